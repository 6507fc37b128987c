"""The live page of deployments of any size, with any names, on any screen, and once its frontend is gone."""

import pytest

from penstock.frontend.tenants.usage import TenantUse
from penstock.frontend.watch.snapshot import LinkRow
from tests.support import snapshots
from tests.support.browser import Page
from tests.support.page_site import page_site

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

LIVE = "document.querySelector('#status').innerText.startsWith('live')"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OWNED = "document.title = 'owned'"
HOSTILE = f'<img src=x onerror="{OWNED}">"\'&amp;<script>{OWNED}</script>'
NOTHING = {"workers": (), "models": (), "requests": (), "decisions": (), "tenants": (), "overview": None}


def fleet(count):
    """A snapshot of so many workers, a quarter of them prefill workers; at most 128 are listed, as by the server."""
    roles = ["prefill" if count > 1 and at % 4 == 0 else "decode" for at in range(count)]
    conditions = {"prefill": "prefill_only", "decode": "ready"}
    links = {
        "prefill": (),
        "decode": (LinkRow(source="prefill-0", transport="shm", num_bytes=10**7, seconds=0.5),),
    }
    workers = tuple(
        snapshots.worker(f"{role}-{at}", role=role, condition=conditions[role], links=links[role])
        for at, role in enumerate(roles[:128])
    )
    return snapshots.body(workers=workers, num_workers=count)


def hostile():
    tenant = TenantUse(
        name=HOSTILE, inflight=1, concurrency=None, requests_per_s=None, tokens_per_min=None, tokens_left=None
    )
    return snapshots.body(
        models=(HOSTILE,),
        workers=(snapshots.worker(HOSTILE, model=HOSTILE, problem=HOSTILE, condition="lost", host=HOSTILE),),
        requests=(snapshots.journey(HOSTILE, HOSTILE, tenant=HOSTILE, model=HOSTILE),),
        decisions=(snapshots.decision(HOSTILE, HOSTILE, prefill=HOSTILE),),
        alerts=(snapshots.alert(HOSTILE),),
        tenants=(tenant,),
    )


@pytest.mark.parametrize(
    ("count", "width"),
    [
        (8, 390),
        (200, 1280),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in ((0, 390), (0, 1280), (1, 390), (200, 390))
        ),
    ],
)
def test_it_fits_the_screen_whatever_the_deployment_has(count, width):
    with page_site(fleet(count) if count else snapshots.body(**NOTHING)) as site, Page(width=width) as page:
        page.open(site.url)
        page.until(LIVE)
        assert page.run(OVERFLOW) <= 0
        assert page.run("document.querySelectorAll('#workers tbody tr').length") == min(count, 128)
        said = page.run("document.querySelector('#main').innerText")
        assert ("and 72 more" in said) is (count == 200)
        for text in ("No planner", "No tenants", "No request yet"):
            assert (text in said) is (count == 0)
        assert page.problems == []


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.nightly)])
def test_names_are_text(width):
    with page_site(hostile()) as site, Page(width=width) as page:
        page.open(site.url)
        page.until(LIVE)
        for section in (
            "served",
            "alerts",
            "workers",
            "topology",
            "requests",
            "way",
            "decisions",
            "tenants",
            "model",
        ):
            assert "<img src=x" in page.run(f"document.getElementById({section!r}).textContent"), section
        assert page.run("document.querySelectorAll('main img, main script').length") == 0
        assert page.run("document.title") == "Penstock"
        assert page.run(OVERFLOW) <= 0
        page.run("document.querySelector('#workers button').focus()")
        page.press("Enter", text="\r")
        page.until("document.querySelector('#status').innerText.startsWith('killed')")
        (path,) = site.killed
        assert path.startswith("/watch/workers/%3Cimg%20src%3Dx")
        assert page.problems == []


def test_why_a_request_went_its_way_stays_when_newer_decisions_have_come():
    requests = tuple(snapshots.journey(f"r{number}-0", "prefill-1", "decode-1") for number in range(3))
    first = snapshots.body(requests=requests, decisions=(snapshots.decision("r1-0", "decode-1"),))
    with page_site(first) as site, Page() as page:
        page.open(site.url)
        page.until("document.querySelectorAll('#requests button').length === 3")
        page.run("document.querySelectorAll('#requests button')[1].click()")
        page.until("document.querySelector('#way').innerText.includes('decode-9')")
        newer = tuple(snapshots.decision(f"s{number}-0", "decode-7") for number in range(12))
        site.body = snapshots.body(requests=requests, decisions=newer)
        page.until("document.querySelector('#decisions').innerText.includes('decode-7')")
        assert "decode-9" in page.run("document.querySelector('#way').innerText")
        page.run("document.querySelectorAll('#requests button')[0].click()")
        page.until("!document.querySelector('#way').innerText.includes('decode-9')")


def test_a_frontend_that_is_gone_is_said_with_what_was_seen_last():
    with page_site(fleet(8)) as site, Page() as page:
        page.open(site.url)
        page.until(LIVE)
        assert not page.run("document.body.classList.contains('stale')")
        site.end()
        said = page.until(
            "document.body.classList.contains('stale') && document.querySelector('#status').innerText"
        )
        assert "tries again; below is what was seen at" in said
        assert page.run("document.querySelectorAll('#workers tbody tr').length") == 8
