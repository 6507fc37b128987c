"""Link bandwidth estimates: seconds per byte of KV between any two workers, from the topology and from measured reads.

A decode worker reports its reads as totals for each prefill worker. The growth of a total, over what the topology predicts
for as many bytes, is one observation. A pair's first report only starts its count, as that read also set connections up.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.instances import Location
from penstock.core.types.load import KvRead
from penstock.perf.latency import Correction
from penstock.router.config import RouterConfig

_SECONDS_MIN = 0.01
"""Seconds of reads that make one observation, as event loops' clocks have milliseconds."""
_WEIGHT = 0.25
"""Weight of the latest observation in what was measured."""
FORGOTTEN_S = 30.0
"""An idle pair's correction is forgotten after this long, and the pair is tried again."""


@dataclass(slots=True)
class _Pair:
    """A pair's totals as counted so far, when, its correction, and its seconds per byte as measured lately; infinite before that."""

    counted: KvRead
    counted_s: float
    correction: Correction = field(default_factory=Correction)
    measured_byte_s: float = math.inf


class LinkBandwidths:
    """Seconds per byte between workers, by slot. A worker's row is computed when first asked for. One event loop owns it.

    There are at most as many pairs as prefill workers times decode workers.
    """

    def __init__(self, config: RouterConfig, num_slots: int) -> None:
        """Know no worker.

        Args:
            config: says what lies between two locations.
            num_slots: of all columns.
        """
        self._config = config
        self._locations = [Location()] * num_slots
        self._rows: dict[Location, NDArray[np.float64]] = {}
        self._pairs: dict[int, dict[int, _Pair]] = {}  # by source, by reader
        self._corrected: dict[int, NDArray[np.float64]] = {}  # rows of sources of which something was learned

    def put(self, slot: int, location: Location) -> None:
        """Take a worker's location."""
        if self._locations[slot] != location:
            self._locations[slot] = location
            self._rows.clear()
            self._corrected.clear()

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        self._locations += [Location()] * (num_slots - len(self._locations))
        self._rows.clear()
        self._corrected.clear()

    def forget(self, slot: int) -> None:
        """Forget all pairs of a worker."""
        self._pairs.pop(slot, None)
        self._corrected.pop(slot, None)
        for source, readers in self._pairs.items():
            if readers.pop(slot, None) is not None:
                self._corrected.pop(source, None)

    def forget_unused(self, now_s: float) -> None:
        """Forget the correction of pairs without a report for `FORGOTTEN_S`."""
        for source, readers in self._pairs.items():
            for pair in readers.values():
                if pair.correction.observations and now_s - pair.counted_s >= FORGOTTEN_S:
                    pair.correction, pair.measured_byte_s = Correction(), math.inf
                    self._corrected.pop(source, None)

    def report(self, source: int, reader: int, read: KvRead, now_s: float) -> None:
        """Learn from the totals that the worker in slot `reader` has read of the worker in slot `source`.

        Nothing is learned where `router.disagg.link_bytes_per_s` is set.
        """
        if self._config.disagg.link_bytes_per_s is not None:
            return
        readers = self._pairs.setdefault(source, {})
        pair = readers.get(reader)
        if pair is None or read.num_bytes < pair.counted.num_bytes:
            readers[reader] = _Pair(read, now_s)
            return
        seconds = read.seconds - pair.counted.seconds
        if seconds < _SECONDS_MIN:
            return
        byte_s = self._by_location(source)[reader]
        num_bytes = read.num_bytes - pair.counted.num_bytes
        pair.correction.observe(byte_s * num_bytes, seconds)
        measured_s, before_s = seconds / max(num_bytes, 1), pair.measured_byte_s
        weight = _WEIGHT if math.isfinite(before_s) else 1.0
        pair.measured_byte_s = measured_s if weight == 1.0 else before_s + weight * (measured_s - before_s)
        pair.counted, pair.counted_s = read, now_s
        if source in self._corrected:
            self._corrected[source][reader] = byte_s * pair.correction.factor

    def byte_s(self, source: int) -> NDArray[np.float64]:
        """Give (num_slots,) seconds per byte from the worker in slot `source` to each; valid until the next change."""
        readers = self._pairs.get(source)
        if not readers:
            return self._by_location(source)
        row = self._corrected.get(source)
        if row is None:
            row = self._corrected[source] = self._by_location(source).copy()
            for reader, pair in readers.items():
                row[reader] *= pair.correction.factor
        shown = row.view()
        shown.flags.writeable = False
        return shown

    def measured_byte_s(self, source: int) -> NDArray[np.float64]:
        """Give (num_slots,) seconds per byte from the worker in slot `source`, as measured or configured; infinite where neither is so."""
        if self._config.disagg.link_bytes_per_s is not None:
            return self._by_location(source)
        row = np.full(len(self._locations), math.inf)
        for reader, pair in self._pairs.get(source, {}).items():
            row[reader] = pair.measured_byte_s
        return row

    def check(self) -> None:
        """Raise AssertionError where a row is not what its pairs say."""
        for source, row in self._corrected.items():
            factors = np.ones(len(self._locations))
            for reader, pair in self._pairs[source].items():
                factors[reader] = pair.correction.factor
            assert np.array_equal(row, self._by_location(source) * factors), f"slot {source}: its row"

    def _by_location(self, source: int) -> NDArray[np.float64]:
        here = self._locations[source]
        row = self._rows.get(here)
        if row is None:
            paths = [self._config.kv_path(here, there) for there in self._locations]
            row = self._rows[here] = 1.0 / np.array([path.bandwidth_bytes_per_s for path in paths])
            row.flags.writeable = False
        return row
