"""What a byte of KV takes between workers, by where they are, and by what reading it took."""

import numpy as np
import pytest

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Location
from penstock.core.types.load import KvRead
from penstock.perf.topology import NetworkPath, Topology
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.fleet.links import FORGOTTEN_S, LinkBandwidths

TOPOLOGY = Topology(
    same_host=NetworkPath(latency_s=0, bandwidth_bytes_per_s=400e9),
    same_rack=NetworkPath(latency_s=0, bandwidth_bytes_per_s=50e9),
)


def bandwidths_of(link_bytes_per_s=None):
    config = RouterConfig(topology=TOPOLOGY, disagg=DisaggConfig(link_bytes_per_s=link_bytes_per_s))
    table = LinkBandwidths(config, 2)
    table.put(0, Location(host="a"))
    table.put(1, Location(host="b"))
    return table


def bandwidths(table, source):
    table.byte_s(source)
    table.check()
    return (1 / table.byte_s(source)).tolist()


class Reader:
    """The worker in slot 1, who reads from the one in slot 0, on another host, and reports it."""

    def __init__(self, table):
        self.table = table
        self.num_bytes = 0
        self.seconds = 0.0
        self.now_s = 0.0

    def read(self, bytes_per_s, times=1, seconds=0.1):
        for _ in range(times):
            self.now_s += 1.0
            self.seconds += seconds
            self.num_bytes += round(bytes_per_s * seconds)
            told = KvRead(
                prefill_worker=WorkerId(1), transport="tcp", num_bytes=self.num_bytes, seconds=self.seconds
            )
            self.table.report(0, 1, told, self.now_s)
            self.table.check()


def test_what_reading_takes_corrects_the_price_of_this_pair_alone():
    table = bandwidths_of()
    reader = Reader(table)
    before = table.byte_s(0)
    reader.read(10e9, times=20)
    assert bandwidths(table, 0) == pytest.approx([400e9, 10e9], rel=0.01)
    assert bandwidths(table, 1) == pytest.approx([50e9, 400e9])
    assert (1 / before).tolist() == pytest.approx([400e9, 50e9]), "what was given stays as it was"
    reader.read(100e9, times=30)
    assert bandwidths(table, 0) == pytest.approx([400e9, 100e9], rel=0.01)
    with pytest.raises(ValueError, match="read-only"):
        table.byte_s(0)[:] = 0


def test_the_first_read_which_connects_and_a_hiccup_count_for_nothing():
    table = bandwidths_of()
    reader = Reader(table)
    reader.read(1e6)
    reader.read(50e9, times=5)
    reader.read(1e6)
    reader.read(50e9, times=5)
    assert bandwidths(table, 0) == pytest.approx([400e9, 50e9], rel=0.01)


@pytest.mark.parametrize("gone", [0, 1])
def test_who_takes_the_place_of_one_that_is_gone_begins_anew(gone):
    table = bandwidths_of()
    Reader(table).read(10e9, times=20)
    table.forget(gone)
    assert bandwidths(table, 0) == pytest.approx([400e9, 50e9])
    Reader(table).read(20e9, times=20)
    assert bandwidths(table, 0) == pytest.approx([400e9, 20e9], rel=0.01)


def read(num_bytes, seconds):
    return KvRead(prefill_worker=WorkerId(1), transport="tcp", num_bytes=num_bytes, seconds=seconds)


def test_what_was_measured_is_told_apart_from_what_the_topology_says():
    table = bandwidths_of()
    assert np.isinf(table.measured_byte_s(0)).all()
    table.report(0, 1, read(1_000_000, 1.0), 1.0)
    assert np.isinf(table.measured_byte_s(0)).all(), "the first read set connections up"
    table.report(0, 1, read(2_000_000, 1.5), 2.0)
    assert table.measured_byte_s(0).tolist() == [np.inf, pytest.approx(5e-7)]
    table.report(0, 1, read(3_000_000, 2.4), 3.0)
    assert table.measured_byte_s(0)[1] == pytest.approx(6e-7)
    assert np.isinf(table.measured_byte_s(1)).all()
    table.forget_unused(3.0 + FORGOTTEN_S)
    assert np.isinf(table.measured_byte_s(0)).all()
