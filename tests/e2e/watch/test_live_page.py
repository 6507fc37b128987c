"""The live page in a real browser: of real processes and of deployments of any size, usable without a mouse, and it kills a worker."""

import asyncio
import json

import pytest

from penstock.frontend.limits.tenants import TenantUse
from penstock.frontend.watch.snapshot import LinkRow
from tests.support import snapshots
from tests.support.browser import Page
from tests.support.clients import ROOT
from tests.support.page_site import page_site

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]
AXE = ROOT / "node" / "node_modules" / "axe-core" / "axe.min.js"

BLOCKS = {"replicas": 1, "engine": "mock", "kv_blocks": 400}
DISAGGREGATED = {"roles": {"prefill": BLOCKS, "decode": {**BLOCKS, "replicas": 2}}}
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}
PLANNER = {"max_workers": 4, "react_period_s": 0.5, "floor_period_s": 2, "cold_s": 1}
ROWS = "document.querySelectorAll('#workers tbody tr')"
META = "document.querySelector('#talk .meta')?.textContent"


def said(selector):
    return f"document.querySelector({selector!r}).innerText"


def faults(page):
    """List what axe-core, the checker of accessibility, finds in the page: contrasts, names, roles, order, scrolling by keyboard."""
    page.run(f"{AXE.read_text()}; 0")
    return page.run(
        "axe.run(document).then(({violations}) => violations.flatMap(({id, nodes}) =>"
        " nodes.map(({target, failureSummary}) => `${id}: ${target.join(' ')}: ${failureSummary}`)))"
    )


def demo(**fields):
    page = {"kills_workers": True}
    return {"frontend": {"port": 0, "drain_timeout_s": 10, "page": page}, **fields}


def test_it_shows_workers_a_chat_and_the_way_of_its_request(deploy, tmp_path):
    async def scenario(site):
        await site.tell("warm " * 60, max_tokens=8)
        await asyncio.to_thread(watch, site.url)

    def watch(url):
        with Page() as page:
            page.open(url)
            page.until(f"{ROWS}.length == 3")
            page.until("document.querySelector('#status').innerText.startsWith('live')")
            for name in ("prefill-1", "decode-1", "decode-2"):
                assert name in page.run(said("#workers"))
                assert name in page.run("document.querySelector('#topology').textContent")
            page.until("document.querySelectorAll('#workers .cell-cached').length > 0")
            page.run("document.getElementById('message').focus()")
            page.write("What does the router do? " * 8)
            page.press("Enter", text="\r")
            meta = page.until(META)
            assert "prefill-1 (prompt)" in meta
            assert "prompt tokens cached" in meta
            page.until("document.querySelectorAll('#way .steps li').length == 5")
            steps = page.run("[...document.querySelectorAll('#way .steps b')].map(each => each.innerText)")
            assert steps == ["Frontend", "Router", "Prefill", "KV transfer", "Decode"]
            assert "least" not in page.run(said("#alerts"))
            page.until("document.querySelectorAll('#decisions tbody tr').length >= 2")
            assert page.problems == []
            assert {asked.split("/")[2] for asked in page.asked} == {url.split("/")[2]}
            page.screenshot(tmp_path / "page.png")
            assert (tmp_path / "page.png").stat().st_size > 20_000

    deploy(scenario, timeout_s=240, router=ALWAYS, **demo(**DISAGGREGATED))


def test_a_killed_worker_is_an_alert_and_comes_back_and_the_stream_goes_on(deploy):
    async def scenario(site):
        def watch():
            with Page() as page:
                page.open(site.url)
                page.until(f"{ROWS}.length == 2")
                before = page.run(
                    "[...document.querySelectorAll('#workers span[title]')].map(each => each.title)"
                )
                page.run("document.querySelector('#workers button').click()")
                page.until("document.querySelector('#alerts').innerText.includes('worker-1')")
                page.until(
                    f"{ROWS}.length == 2 && document.querySelector('#alerts').innerText.includes('nothing needs')"
                )
                after = page.run(
                    "[...document.querySelectorAll('#workers span[title]')].map(each => each.title)"
                )
                assert before[0] != after[0]
                assert before[1] == after[1]
                assert page.problems == []

        streams = [asyncio.ensure_future(site.tell(f"{n} tell me", max_tokens=300)) for n in range(4)]
        await asyncio.to_thread(watch)
        for stream in streams:
            _, usage = await stream
            assert usage.completion_tokens == 300

    deploy(scenario, workers=2, timeout_s=240, role={"mock": {"timing": {"step_s": 0.02}}}, **demo())


@pytest.mark.needs("node clients")
def test_it_is_usable_by_keyboard_and_screen_reader_in_both_themes(deploy):
    async def scenario(site):
        await site.tell("hello", max_tokens=4)
        await asyncio.to_thread(watch, site.url)

    def watch(url):
        with Page() as page:
            page.open(url)
            page.until(f"{ROWS}.length == 1")
            page.until("document.querySelectorAll('#requests button').length > 0")
            nodes = page.accessible()
            roles = {role for role, _ in nodes}
            assert {"banner", "main", "heading", "table", "log", "status", "region"} <= roles
            for role in ("button", "combobox", "textbox", "image", "table", "region"):
                assert all(name for found, name in nodes if found == role), (role, nodes)
            reached = []
            for _ in range(40):
                page.press("Tab")
                reached.append(page.run("(document.activeElement.closest('[id]') || {}).id"))
            assert [name for name in reached if name in {"pause", "theme", "keys", "message", "send"}][
                :5
            ] == ["pause", "theme", "keys", "message", "send"]
            assert "requests" in reached
            page.run("document.querySelector('#requests button').focus()")
            focused = page.run("document.activeElement.textContent")
            page.run("new Promise(done => setTimeout(done, 2500))")  # two snapshots pass
            assert page.run("document.activeElement.textContent").split(",")[0] == focused.split(",")[0]
            for theme in ("light", "dark"):
                page.show_as(theme)
                assert faults(page) == [], theme
            page.run("document.getElementById('pause').click()")
            page.until("document.querySelector('#status').innerText == 'paused'")
            assert page.problems == []

    deploy(scenario, timeout_s=240, **demo())


@pytest.mark.nightly
@pytest.mark.needs("node clients")
def test_every_section_is_sound_when_full(deploy):
    async def scenario(site):
        for number in range(6):
            await site.tell(f"{number} tell me " * 40, max_tokens=8)
        await asyncio.to_thread(watch, site.url)

    def watch(url):
        with Page() as page:
            page.open(url)
            page.until(f"{ROWS}.length == 3")
            page.until("document.querySelectorAll('#planner li').length > 0")
            page.run("document.getElementById('message').focus()")
            page.write("What does the router do? " * 8)
            page.press("Enter", text="\r")
            page.until(META)
            page.until("document.querySelectorAll('#way .steps li').length == 5")
            page.run("document.querySelector('#workers button').click()")
            page.until("document.querySelector('#alerts .alert:not(.fine)') !== null")
            page.run("document.getElementById('pause').click()")
            page.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            for theme in ("light", "dark"):
                page.show_as(theme)
                assert faults(page) == [], theme
            page.run("document.getElementById('keys').click()")
            assert faults(page) == []

    fields = demo(**DISAGGREGATED) | {"slo": {"ttft_s": 0.5, "itl_s": 0.1}, "planner": PLANNER}
    deploy(scenario, timeout_s=240, router=ALWAYS, **fields)


def test_with_keys_it_asks_for_them_and_then_shows_everything(deploy, monkeypatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "the-key")

    async def scenario(site):
        await asyncio.to_thread(watch, site.url, site.deployment.admin_token)

    def watch(url, token):
        with Page() as page:
            page.open(url)
            page.until("document.getElementById('sign-in').open")
            page.write(token)
            page.run("document.getElementById('api-key').focus()")
            page.write("the-key")
            page.press("Enter", text="\r")
            page.until(f"{ROWS}.length == 1")
            page.run("document.getElementById('message').focus()")
            page.write("hello")
            page.press("Enter", text="\r")
            assert "by worker-1" in page.until(META)
            page.until("document.querySelector('#tenants').innerText.includes('default')")
            stored = json.loads(page.run("JSON.stringify(localStorage)"))
            assert "the-key" not in str(stored)
            assert token not in str(stored)

    deploy(scenario, timeout_s=240)


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
