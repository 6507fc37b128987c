"""Which workers of a model can read KV from which others, and why not.

A pair fits where both keep KV alike and one can read the other's memory. What decides that is the same for nearly all
workers of a deployment but for the host, of which only counts whether it is the same one. So it is worked out once for each
two kinds of worker, on one host and on two, when somebody asks.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.types.instances import Instance, Role
from penstock.core.types.kv_exchange import KvExchange
from penstock.core.types.kv_layout import KvLayout
from penstock.router.workers.member import identity
from penstock.transfer.reshard.moves import mismatch

_WITHIN_A_HOST = frozenset({"memory", "shm"})
_REASONS_MAX = 4096
"""Pairs of kinds that are remembered; more are asked anew."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What decides whether a worker fits another one, beside their hosts; `key` is the same for equal ones."""

    key: bytes
    identity: tuple[int, bytes]
    layout: KvLayout | None
    exchange: KvExchange | None

    @classmethod
    def of(cls, instance: Instance) -> "_Kind":
        layout = instance.engine.kv_layout
        if layout is not None:  # how many blocks there are plays no part
            ranks = tuple(msgspec.structs.replace(rank, num_blocks=1) for rank in layout.ranks)
            layout = msgspec.structs.replace(layout, ranks=ranks)
        names = identity(instance.card)
        exchange = instance.exchange
        ways = None if exchange is None else (exchange.transports, exchange.listens)
        return cls(msgspec.msgpack.encode((names, layout, ways)), names, layout, exchange)


def _unfit(producer: _Kind, taker: _Kind, *, same_host: bool) -> str | None:
    """Say why prompts cannot be handed over from one to the other; None if they can."""
    (size_there, salt_there), (size_here, salt_here) = producer.identity, taker.identity
    if size_there != size_here:
        return f"blocks of {size_there} tokens there, of {size_here} here"
    if salt_there != salt_here:
        return "other weights, number formats or engine: their cards have different salts"
    unreachable = _unreachable(producer, taker, same_host=same_host)
    return unreachable or _unlike(producer.layout, taker.layout)


def _unreachable(producer: _Kind, taker: _Kind, *, same_host: bool) -> str | None:
    here, there = taker.exchange, producer.exchange
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
class Kinds:
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
        elsewhere, on_host = self.fits[:, self.numbers[source]]
        if (elsewhere == on_host).all():
            return np.asarray(elsewhere[self.numbers], dtype=np.bool_)
        same_host = self.hosts == self.hosts[source]
        return np.asarray(np.where(same_host, on_host[self.numbers], elsewhere[self.numbers]), dtype=np.bool_)


@dataclass(slots=True)
class _Group:
    """The workers of a kind: how many there are on each host, and one of them."""

    kind: _Kind
    first: Instance
    hosts: Counter[bytes | None] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return self.hosts.total()


class KvTransferPairs:
    """The workers of one model as prefill and decode workers. One event loop owns it."""

    def __init__(self) -> None:
        """Know of nobody."""
        self._workers: dict[int, tuple[Instance, _Kind]] = {}  # by slot
        self._kinds: list[_Kind] = []
        self._numbers: NDArray[np.intp] | None = None  # (num_slots,) into these; None once somebody changed
        self._hosts: NDArray[np.intp] = np.zeros(1, dtype=np.intp)  # (num_slots,), likewise
        self._num_hosts = 0
        self._groups: dict[tuple[bool, bytes], _Group] | None = None  # likewise
        self._fits: NDArray[np.bool_] = np.zeros((2, 1, 1), dtype=np.bool_)  # on two hosts and on one
        self._all_fit = False  # each of these with each
        self._reasons: dict[
            tuple[bytes, bytes, bool], str | None
        ] = {}  # why kinds do not fit, on two hosts or one

    def put(self, slot: int, instance: Instance) -> None:
        """Take in a worker, or what discovery says anew about one."""
        self._workers[slot] = instance, _Kind.of(instance)
        self._numbers = self._groups = None

    def remove(self, slot: int) -> None:
        """Forget a worker."""
        del self._workers[slot]
        self._numbers = self._groups = None

    def kinds(self, num_slots: int) -> Kinds:
        """Number the kinds of workers and their hosts; slots without a worker have the first ones. Not to be written to."""
        if self._numbers is None or len(self._numbers) != num_slots:
            self._number(num_slots)
            assert self._numbers is not None, "just made"
        return Kinds(self._numbers, self._hosts, self._fits)

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
        """Mask those of `ready` (num_slots,) whose prompts one of `decode_workers` (num_slots,) can take over."""
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
        """Say why the worker in this slot hands no prompt over, or takes none; None where it can, or nobody is there to."""
        instance, kind = self._workers[slot]
        hands_over = instance.role is Role.PREFILL
        others = [group for (other, _), group in self._grouped().items() if other is not hands_over]
        if not others:
            return (
                "no decode or aggregated worker of its model is there to go on with its prompts"
                if hands_over
                else None
            )
        host = _host(instance)
        for group in others:
            on_host = group.hosts[host]
            for same_host, count in ((True, on_host), (False, group.count - on_host)):
                if count and self._reason_between(kind, group.kind, hands_over, same_host=same_host) is None:
                    return None
        first = others[0].first
        reason = self._reason_between(kind, others[0].kind, hands_over, same_host=_host(first) == host)
        does = "go on with its prompts" if hands_over else "hand it prompts"
        count = sum(group.count for group in others)
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
        self._numbers, self._hosts = np.zeros(num_slots, dtype=np.intp), np.zeros(num_slots, dtype=np.intp)
        numbers: dict[bytes, int] = {}
        hosts: dict[bytes | None, int] = {}
        self._kinds = []
        for slot, (instance, kind) in self._workers.items():
            if kind.key not in numbers:
                numbers[kind.key] = len(numbers)
                self._kinds.append(kind)
            self._numbers[slot] = numbers[kind.key]
            self._hosts[slot] = hosts.setdefault(_host(instance), len(hosts))
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

    def _grouped(self) -> "dict[tuple[bool, bytes], _Group]":
        """Group workers by whether they hand over, and by kind."""
        if self._groups is None:
            self._groups = {}
            for instance, kind in self._workers.values():
                key = instance.role is Role.PREFILL, kind.key
                self._groups.setdefault(key, _Group(kind, instance)).hosts[_host(instance)] += 1
        return self._groups

    def _reason_between(self, one: _Kind, other: _Kind, hands_over: bool, *, same_host: bool) -> str | None:  # noqa: FBT001
        producer, taker = (one, other) if hands_over else (other, one)
        return self._reason(producer, taker, same_host=same_host)

    def _reason(self, producer: _Kind, taker: _Kind, *, same_host: bool) -> str | None:
        key = producer.key, taker.key, same_host
        if key not in self._reasons:
            if len(self._reasons) >= _REASONS_MAX:
                self._reasons.clear()
            self._reasons[key] = _unfit(producer, taker, same_host=same_host)
        return self._reasons[key]


def _host(instance: Instance) -> bytes | None:
    return None if instance.exchange is None else instance.exchange.host


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
