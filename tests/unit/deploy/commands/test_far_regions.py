"""`penstock ps` says how far another region is."""

from penstock.core.types.scaling import ReplicaState
from penstock.deploy.commands.hosted.ps import Link, Listed, _links, table
from penstock.deploy.control.messages import ProcessView

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
