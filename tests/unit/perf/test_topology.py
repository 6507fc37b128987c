"""What lies between two locations: the widest level at which they differ decides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Location
from penstock.perf.topology import RegionPair, Topology

names = st.sampled_from(["", "a", "b"])
locations = st.builds(Location, host=names, rack=names, zone=names, region=names)
TOPOLOGY = Topology(pairs=(RegionPair(one="a", other="b", latency_s=0.03, bandwidth_bytes_per_s=2e8),))


def at(host: str = "h", rack: str = "r", zone: str = "z", region: str = "eu") -> Location:
    return Location(host=host, rack=rack, zone=zone, region=region)


@pytest.mark.parametrize(
    ("other", "level"),
    [
        (at(), "same_host"),
        (at(host="h2"), "same_rack"),
        (at(host="h2", rack="r2"), "same_zone"),
        (at(zone="z2"), "same_region"),
        (at(region="us"), "between_regions"),
        (Location(), "same_host"),
        (Location(host="h2"), "same_rack"),
    ],
)
def test_the_widest_level_at_which_they_differ(other: Location, level: str) -> None:
    topology = Topology()
    assert topology.path(at(), other) is getattr(topology, level)


@given(locations, locations)
def test_it_is_as_far_back(one: Location, other: Location) -> None:
    assert TOPOLOGY.path(one, other) == TOPOLOGY.path(other, one)
    assert TOPOLOGY.path(one, one) is TOPOLOGY.same_host


def test_a_named_pair_of_regions_holds_both_ways() -> None:
    a, b, c = (Location(region=name) for name in "abc")
    assert TOPOLOGY.path(a, b).latency_s == TOPOLOGY.path(b, a).latency_s == 0.03
    assert TOPOLOGY.path(a, c) is TOPOLOGY.between_regions


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([("eu", "eu")], "pairs.0: one and other: must be two regions, got 'eu' twice"),
        ([("eu", "us"), ("us", "eu")], "pairs: us and eu are described twice"),
        ([("eu", "")], "pairs.0.other"),
    ],
)
def test_pairs_that_are_none(pairs: list[tuple[str, str]], said: str) -> None:
    data = [{"one": a, "other": b, "latency_s": 0.1, "bandwidth_bytes_per_s": 1e8} for a, b in pairs]
    with pytest.raises(ConfigError, match=said):
        Topology.parse({"pairs": data}, source="graph.yaml")
