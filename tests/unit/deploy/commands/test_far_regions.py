"""`penstock ps` and `penstock top` say how far another region is."""

import io

import rich.console

from penstock.core.types.scaling import ReplicaState
from penstock.deploy.commands.hosted.ps import Link, Listed, _links, table
from penstock.deploy.commands.watching.screen import screen
from penstock.deploy.control.messages import ProcessView
from penstock.frontend.watch.snapshot import RegionRow, Snapshot, WorkerRow

PROCESSES = (
    ProcessView(name="frontend-1", pid=1, state=ReplicaState.READY),
    ProcessView(name="link-eu", pid=2, state=ReplicaState.READY, region="eu"),
)


def test_ps_says_how_far_a_region_is_and_which_of_its_frontends_answer():
    workers = [
        {"condition": "ready", "load": {"link": None}},
        {"condition": "lost", "load": None},
        {"condition": "ready", "load": {"link": {"region": "eu", "round_trip_s": 0.0812, "frontends": 2, "healthy": 1}}},
    ]  # fmt: skip
    links = _links(workers)
    assert links == (Link("eu", "ready", 0.0812, 2, 1),)
    listed = Listed(name="demo", state="running", directory="d", processes=PROCESSES, links=links)
    _, frontend, link = table([listed])
    assert "away" not in frontend
    assert "81.2 ms away, 1 of 2 frontends" in link


def test_ps_says_nothing_of_the_way_before_it_is_measured():
    links = (Link("eu", "connecting", 0.0, 1, 0),)
    listed = Listed(name="demo", state="running", directory="d", processes=PROCESSES, links=links)
    assert not any("away" in line for line in table([listed]))


def test_top_says_how_far_a_region_is():
    region = RegionRow(name="eu", round_trip_s=0.081, frontends=2, healthy=2, told_chunks=3, told_age_s=4.0)
    row = WorkerRow(
        name="link-eu", role="aggregated", condition="ready", problem=None, host="", pid=2, running=0, waiting=0,
        open_requests=0, prefilled_tokens=0, hit_tokens=0, generated_tokens=0, preemptions=0, sessions=0, speed=None,
        tiers=(), links=(), region=region,
    )  # fmt: skip
    seen = Snapshot(
        time_s=0.0, version="1", pid=1, models=("m",), queued=0, num_workers=1, workers=(row,), requests=(), decisions=(),
        tenants=(), alerts=(), overview=None, can_kill=False,
    )  # fmt: skip
    out = io.StringIO()
    rich.console.Console(file=out, width=200).print(screen(seen, (), 30))
    assert "eu 81 ms away, 2 of 2 frontends, told 4.00 s ago" in out.getvalue()
