"""What a byte of KV takes between workers, by where they are."""

import numpy as np
import pytest

from penstock.core.location import Location
from penstock.perf.topology import Topology, Way
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.kv_ways import KvWays

TOPOLOGY = Topology(
    same_host=Way(latency_s=0, bandwidth_bytes_per_s=400e9),
    same_rack=Way(latency_s=0, bandwidth_bytes_per_s=50e9),
)


def ways(link_bytes_per_s=None):
    config = RouterConfig(topology=TOPOLOGY, disagg=DisaggConfig(link_bytes_per_s=link_bytes_per_s))
    table = KvWays(config, 2)
    table.put(0, Location(host="a"))
    table.put(1, Location(host="b"))
    return table


def bandwidths(table, source):
    return (1 / table.byte_s(source)).tolist()


def test_workers_of_a_host_are_closer_than_others():
    table = ways()
    assert bandwidths(table, 0) == pytest.approx([400e9, 50e9])
    assert bandwidths(table, 1) == pytest.approx([50e9, 400e9])


def test_what_is_said_of_links_holds_for_all():
    assert bandwidths(ways(7e9), 0) == pytest.approx([7e9, 7e9])


def test_who_moves_is_elsewhere():
    table = ways()
    assert bandwidths(table, 0) == pytest.approx([400e9, 50e9])
    table.put(1, Location(host="a"))
    assert bandwidths(table, 0) == pytest.approx([400e9, 400e9])


def test_there_are_as_many_as_slots():
    table = ways()
    table.byte_s(0)
    table.grow(4)
    table.put(3, Location(host="b"))
    assert bandwidths(table, 1) == pytest.approx([50e9, 400e9, 400e9, 400e9]), "nobody knows where 2 is"


def test_somebody_unknown_is_taken_to_be_near_and_rows_stay_as_they_are():
    table = ways()
    assert bandwidths(table, None) == pytest.approx([400e9, 400e9])
    with pytest.raises(ValueError, match="read-only"):
        table.byte_s(0)[:] = 0
    assert np.array_equal(table.byte_s(0), table.byte_s(0))
