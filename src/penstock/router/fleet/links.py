"""Links: how far a worker is from this router, whether KV can move between two workers, and how fast."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.types.instances import Instance, Location, Role
from penstock.core.types.kv import KvExchange, KvLayout
from penstock.core.types.load import KvRead
from penstock.perf.latency import Correction
from penstock.perf.topology import NetworkPath
from penstock.router.config import RouterConfig
from penstock.router.fleet.member import identity
from penstock.transfer.reshard import mismatch

_LATENCY_S_MAX = 60.0


def path_to(instance: Instance, config: RouterConfig, round_trip_s: float = 0.0) -> NetworkPath:
    """Give the way to a worker.

    Args:
        instance: its registration; links to other regions may say how far these are.
        config: where this router is, and the topology, which tells how far other workers are.
        round_trip_s: as a link has measured it, which counts more than what anybody says; 0: not measured.
    """
    said = instance.distance
    path = config.topology.path(config.location, Location.of(instance)) if said is None else said
    latency_s = round_trip_s / 2 or path.latency_s
    return NetworkPath(
        latency_s=min(max(latency_s, 0.0), _LATENCY_S_MAX),
        bandwidth_bytes_per_s=max(path.bandwidth_bytes_per_s, 1.0),
    )


_WITHIN_A_HOST = frozenset({"memory", "shm"})
_REASONS_MAX = 4096
"""Bound of remembered pairs of kinds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What decides whether two workers fit, beside their hosts; equal kinds have equal keys."""

    key: bytes
    identity: tuple[int, bytes]
    layout: KvLayout | None
    exchange: KvExchange | None

    @classmethod
    def of(cls, instance: Instance) -> "_Kind":
        layout = instance.engine.kv_layout
        layout = None if layout is None else layout.of_a_block()
        names = identity(instance.card)
        exchange = instance.exchange
        ways = None if exchange is None else (exchange.transports, exchange.listens)
        return cls(msgspec.msgpack.encode((names, layout, ways)), names, layout, exchange)


def _unfit(source: _Kind, reader: _Kind, *, same_host: bool) -> str | None:
    """Say why `reader` cannot read the KV of `source`; None if it can."""
    (size_there, salt_there), (size_here, salt_here) = source.identity, reader.identity
    if size_there != size_here:
        return f"blocks of {size_there} tokens there, of {size_here} here"
    if salt_there != salt_here:
        return "other weights, number formats or engine: their cards have different salts"
    unreachable = _unreachable(source, reader, same_host=same_host)
    return unreachable or _unlike(source.layout, reader.layout)


def _unreachable(source: _Kind, reader: _Kind, *, same_host: bool) -> str | None:
    here, there = reader.exchange, source.exchange
    if here is None or there is None:
        return "one of the two moves no KV"
    if not same_host and "tcp" not in there.listens:
        return "they are on different hosts, and the one that has the KV listens on no tcp:// address"
    if not common_transports(here, there, same_host=same_host):
        return f"no transport in common: {_listed(there.transports)} there, {_listed(here.transports)} here"
    return None


def _unlike(there: KvLayout | None, here: KvLayout | None) -> str | None:
    if (there is None) != (here is None):
        return "one of the two engines keeps no memory for KV, the other one does"
    if there is None or here is None or there == here:
        return None
    return mismatch(there, here)


def common_transports(here: KvExchange, there: KvExchange, *, same_host: bool) -> set[str]:
    """Name the transports that may move KV between two workers."""
    common = set(here.transports) & set(there.transports)
    return common if same_host else common - _WITHIN_A_HOST


@dataclass(frozen=True, slots=True, eq=False)
class KvKinds:
    """Which decode workers can read the KV of which prefill worker.

    numbers: (num_slots,) the kind of the worker in each slot
    hosts:   (num_slots,) the number of its host
    fits:    (2, kinds of prefill workers, kinds of decode workers) bool: on two hosts, and on one
    """

    numbers: NDArray[np.intp]
    hosts: NDArray[np.intp]
    fits: NDArray[np.bool_]

    def decode_workers(self, source: int) -> NDArray[np.bool_]:
        """Mask (num_slots,) the workers that can read the KV of the worker in slot `source`."""
        return self._partners(source, self.fits[:, self.numbers[source]])

    def prefill_workers(self, reader: int) -> NDArray[np.bool_]:
        """Mask (num_slots,) the workers whose KV the worker in slot `reader` can read."""
        return self._partners(reader, self.fits[:, :, self.numbers[reader]])

    def _partners(self, slot: int, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        elsewhere, on_host = fits
        if (elsewhere == on_host).all():
            return np.asarray(elsewhere[self.numbers], dtype=np.bool_)
        same_host = self.hosts == self.hosts[slot]
        return np.asarray(np.where(same_host, on_host[self.numbers], elsewhere[self.numbers]), dtype=np.bool_)


class KvTransferPairs:
    """Which workers of a model can read KV from which others, and why not. One event loop owns it.

    A pair fits where both keep KV alike and the decode worker can reach the prefill worker's memory. Nearly all workers of a
    deployment agree in what decides that, but for the host, of which only counts whether both are on the same. So fitness is worked
    out once for each two kinds of worker, on one host and on two hosts, when first asked.
    """

    def __init__(self) -> None:
        """Know no worker."""
        self._workers: dict[int, tuple[Instance, _Kind]] = {}  # by slot
        self._kinds: list[_Kind] = []
        self._numbers: NDArray[np.intp] | None = None  # (num_slots,) into these; None after a change
        self._hosts: NDArray[np.intp] = np.zeros(1, dtype=np.intp)  # (num_slots,), likewise
        self._num_hosts = 0
        self._is_prefill: NDArray[np.bool_] = np.zeros(1, dtype=np.bool_)  # likewise
        self._is_decode: NDArray[np.bool_] = np.zeros(1, dtype=np.bool_)  # likewise; aggregated workers too
        self._fits: NDArray[np.bool_] = np.zeros((2, 1, 1), dtype=np.bool_)  # on two hosts and on one
        self._all_fit = False  # each of these with each
        self._reasons: dict[
            tuple[bytes, bytes, bool], str | None
        ] = {}  # why kinds do not fit, on two hosts or one

    def put(self, slot: int, instance: Instance) -> None:
        """Add a worker, or what discovery says anew about one."""
        self._workers[slot] = instance, _Kind.of(instance)
        self._numbers = None

    def remove(self, slot: int) -> None:
        """Forget a worker."""
        del self._workers[slot]
        self._numbers = None

    def kinds(self, num_slots: int) -> KvKinds:
        """Number the kinds of workers and their hosts, from 0, as for free slots. Not to be written to."""
        if self._numbers is None or len(self._numbers) != num_slots:
            self._number(num_slots)
            assert self._numbers is not None, "just made"
        return KvKinds(self._numbers, self._hosts, self._fits)

    def readers(self, source: int, num_slots: int) -> Iterator[tuple[int, Instance, Instance]]:
        """Give the workers that can read the KV of the worker in slot `source`: (slot, that worker, reader); nothing of a free slot."""
        if source in self._workers:
            fitting = self.kinds(num_slots).decode_workers(source)
            for slot, (instance, _) in self._workers.items():
                if fitting[slot]:
                    yield slot, self._workers[source][0], instance

    def prefill_workers(
        self, ready: NDArray[np.bool_], decode_workers: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Mask the workers in `ready` (num_slots,) whose KV a worker in `decode_workers` (num_slots,) can read."""
        kinds = self.kinds(len(ready))
        numbers, hosts = kinds.numbers, kinds.hosts
        if self._all_fit and np.count_nonzero(decode_workers):
            return ready
        at = hosts[decode_workers] * len(self._kinds) + numbers[decode_workers]
        here = np.bincount(at, minlength=self._num_hosts * len(self._kinds)).reshape(self._num_hosts, -1)
        elsewhere = here.sum(axis=0) - here  # (hosts, kinds), as is `here`
        fits_by_host = ((elsewhere > 0) @ self._fits[0].T) | ((here > 0) @ self._fits[1].T)
        return np.asarray(ready & fits_by_host[hosts, numbers], dtype=np.bool_)

    def problem(self, slot: int) -> str | None:
        """Say why the worker in this slot transfers KV with no other; None where it can, or where it needs no other."""
        kinds = self.kinds(max(self._workers) + 1 if self._numbers is None else len(self._numbers))
        instance, kind = self._workers[slot]
        is_prefill = instance.role is Role.PREFILL
        others = self._is_decode if is_prefill else self._is_prefill
        count = np.count_nonzero(others)
        if not count:
            return (
                "no decode or aggregated worker of its model is there to go on with its prompts"
                if is_prefill
                else None
            )
        if (others & (kinds.decode_workers(slot) if is_prefill else kinds.prefill_workers(slot))).any():
            return None
        first, other = self._workers[int(others.argmax())]
        source, reader = (kind, other) if is_prefill else (other, kind)
        reason = self._reason(source, reader, same_host=_host(first) == _host(instance))
        does = "go on with its prompts" if is_prefill else "hand it prompts"
        return f"none of {count} workers can {does}; {first.name}: {reason}"

    def check(self) -> None:
        """Raise AssertionError where too much is remembered, or kinds and workers disagree."""
        assert len(self._reasons) <= _REASONS_MAX, f"{len(self._reasons)} pairs of kinds: past the bound"
        if self._numbers is not None:
            for slot, (instance, kind) in self._workers.items():
                assert self._kinds[self._numbers[slot]].key == kind.key, f"slot {slot}: its kind"
                alike = [s for s, (other, _) in self._workers.items() if _host(other) == _host(instance)]
                assert alike == [s for s in self._workers if self._hosts[s] == self._hosts[slot]], (
                    f"slot {slot}: its host"
                )

    def _number(self, num_slots: int) -> None:
        self._numbers, self._hosts = np.zeros((2, num_slots), dtype=np.intp)
        self._is_prefill, self._is_decode = np.zeros((2, num_slots), dtype=np.bool_)
        numbers: dict[bytes, int] = {}
        hosts: dict[bytes | None, int] = {}
        self._kinds = []
        for slot, (instance, kind) in self._workers.items():
            if kind.key not in numbers:
                numbers[kind.key] = len(numbers)
                self._kinds.append(kind)
            self._numbers[slot] = numbers[kind.key]
            self._hosts[slot] = hosts.setdefault(_host(instance), len(hosts))
            of_role = self._is_prefill if instance.role is Role.PREFILL else self._is_decode
            of_role[slot] = True
        self._num_hosts = max(len(hosts), 1)
        fits = [
            [
                [self._reason(one, other, same_host=same_host) is None for other in self._kinds]
                for one in self._kinds
            ]
            for same_host in (False, True)
        ]
        self._fits = np.array(fits, dtype=np.bool_).reshape(2, len(self._kinds), len(self._kinds))
        self._all_fit = bool(self._fits.all())

    def _reason(self, source: _Kind, reader: _Kind, *, same_host: bool) -> str | None:
        key = source.key, reader.key, same_host
        if key not in self._reasons:
            if len(self._reasons) >= _REASONS_MAX:
                self._reasons.clear()
            self._reasons[key] = _unfit(source, reader, same_host=same_host)
        return self._reasons[key]


def _host(instance: Instance) -> bytes | None:
    return None if instance.exchange is None else instance.exchange.host


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


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
    """Seconds per byte of KV between workers, by slot, from the topology and from measured reads. One event loop owns it.

    A decode worker reports its reads as totals for each prefill worker. The growth of a total, over what the topology predicts for
    as many bytes, is one observation. A pair's first report only starts its count, as that read also set connections up. There are at most as many pairs as prefill workers times decode workers.
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
