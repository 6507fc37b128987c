"""Gauges of links to other regions, with the values that links report."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock.core.types.load import LinkProblem, LinkReport
from penstock.router.metrics import RouterMetrics

REPORT = LinkReport(
    region="eu", frontends=3, healthy=2, moved=5, refused=7, clock_skew_s=-1.5, round_trip_s=0.081, advertised_chunks=9, advertised_at_s=1e9,
)  # fmt: skip
VALUES = {
    "frontends": 3, "healthy_frontends": 2, "moved_requests": 5, "refused_requests": 7, "clock_skew_seconds": -1.5,
    "round_trip_seconds": 0.081, "advertised_timestamp_seconds": 1e9, "advertised_share": 1,
}  # fmt: skip


@pytest.fixture
def shown():
    registry = CollectorRegistry()
    links = RouterMetrics(registry).links

    def value(noun, **labels):
        return registry.get_sample_value(
            f"penstock_router_link_{noun}", {"worker": "link-eu", "region": "eu", **labels}
        )

    return links, value


def test_each_figure_of_a_report_is_a_gauge(shown):
    links, value = shown
    links.show("link-eu", REPORT)
    assert {noun: value(noun) for noun in VALUES} == VALUES
    links.show("worker-1", None)
    links.show_advertised_share("link-eu", 0.25)
    links.show("link-eu", msgspec.structs.replace(REPORT, healthy=3))
    assert (value("healthy_frontends"), value("advertised_share")) == (3, 0.25)
    links.forget("link-eu")
    links.forget("link-eu")
    assert not any(value(noun) for noun in VALUES)
    links.show_advertised_share("link-eu", 0.5)
    assert value("advertised_share") is None


def test_one_problem_at_a_time_is_shown_and_a_link_that_never_came_has_one(shown):
    links, value = shown
    links.expect("link-eu", "eu", 2)
    assert (value("frontends"), value("healthy_frontends")) == (2, 0)
    assert value("problem", problem="unreachable") == 1
    for problem in (LinkProblem.CERTIFICATE, LinkProblem.KEY, LinkProblem.SECRET):
        links.show("link-eu", msgspec.structs.replace(REPORT, problem=problem))
        now = {each: value("problem", problem=each) for each in LinkProblem}
        assert [each for each, is_there in now.items() if is_there] == [problem]
    links.show("link-eu", REPORT)
    assert not any(value("problem", problem=each) for each in LinkProblem)
