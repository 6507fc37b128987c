"""Which workers of a model can hand prompts over to which others, why not, and what reaching each other first takes them.

A pair fits where both keep KV alike and one can read the other's memory. What decides that is the same for nearly all
workers of a deployment, so that it is worked out once for each two kinds of worker, when somebody asks.
"""

import math
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.kv_exchange import KvExchange
from penstock.core.kv_layout import KvLayout
from penstock.core.types import Instance, Role
from penstock.router.member import identity
from penstock.transfer.reshard import mismatch

_WITHIN_A_PROCESS = ("memory",)
_WITHIN_A_HOST = frozenset({"memory", "shm", "cuda"})
_REASONS_MAX = 4096
"""Pairs of kinds that are remembered; more are asked anew."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What decides whether a worker fits another one; `key` is the same for equal ones."""

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
        key = msgspec.msgpack.encode((names, layout, instance.exchange))
        return cls(key, names, layout, instance.exchange)


def _unfit(producer: _Kind, taker: _Kind) -> str | None:
    """Say why prompts cannot be handed over from one to the other; None if they can."""
    (size_there, salt_there), (size_here, salt_here) = producer.identity, taker.identity
    if size_there != size_here:
        return f"blocks of {size_there} tokens there, of {size_here} here"
    if salt_there != salt_here:
        return "other weights, number formats or engine: their cards have different salts"
    return _unreachable(producer, taker) or _unlike(producer.layout, taker.layout)


def _unreachable(producer: _Kind, taker: _Kind) -> str | None:
    here, there = taker.exchange, producer.exchange
    if here is None or there is None:
        return "one of the two moves no KV"
    if here.host != there.host and "tcp" not in there.listens:
        return "they are on different hosts, and the one that has the KV listens on no tcp:// address"
    if not _common(here, there):
        return f"no transport in common: {_listed(there.transports)} there, {_listed(here.transports)} here"
    return None


def _unlike(there: KvLayout | None, here: KvLayout | None) -> str | None:
    if (there is None) != (here is None):
        return "one of the two engines keeps no memory for KV, the other one does"
    if there is None or here is None or there == here:
        return None
    return mismatch(there, here)


def _common(here: KvExchange, there: KvExchange) -> set[str]:
    """Name the transports that might move KV between the two."""
    common = set(here.transports) & set(there.transports)
    return common if here.host == there.host else common - _WITHIN_A_HOST


def _setup_s(producer: _Kind, taker: _Kind) -> float:
    """Say what it takes until KV first moves from one to the other, which fits it; nothing where neither keeps memory for it.

    Between hosts an agent prepares every transport when it connects; within one the slow ones wait until nothing else will do.
    """
    here, there = taker.exchange, producer.exchange
    if here is None or there is None or producer.layout is None:
        return 0.0
    common = _common(here, there)
    if there.listens != _WITHIN_A_PROCESS:
        common = common.difference(_WITHIN_A_PROCESS)
    said = zip(here.transports, here.setups_s, strict=False)
    taken_s = [seconds for name, seconds in said if name in common and 0 <= seconds < math.inf]
    which = min if here.host == there.host else max
    return which(taken_s, default=0.0)


@dataclass(slots=True)
class _Group:
    """How many workers are of a kind, and the name of one of them."""

    kind: _Kind
    name: str
    count: int = 0


class HandOverPairs:
    """The workers of one model as producers and takers of KV. One event loop owns it."""

    def __init__(self) -> None:
        """Know of nobody."""
        self._workers: dict[int, tuple[Instance, _Kind]] = {}  # by slot
        self._kinds: list[_Kind] = []
        self._numbers: NDArray[np.intp] | None = None  # (num_slots,) into these; None once somebody changed
        self._groups: dict[tuple[bool, bytes], _Group] | None = None  # likewise
        self.fits: NDArray[np.bool_] = np.zeros((1, 1), dtype=np.bool_)
        """(producers' kinds, takers' kinds), as numbered when `kinds` was last asked for."""
        self._all_fit = False  # each of these with each
        self._setups_s: dict[int, NDArray[np.float64] | None] = {}  # by producers' kind, likewise
        self._reasons: dict[tuple[bytes, bytes], str | None] = {}  # by both kinds' keys, why they do not fit

    def put(self, slot: int, instance: Instance) -> None:
        """Take in a worker, or what discovery says anew about one."""
        self._workers[slot] = instance, _Kind.of(instance)
        self._numbers = self._groups = None

    def remove(self, slot: int) -> None:
        """Forget a worker."""
        del self._workers[slot]
        self._numbers = self._groups = None

    def kinds(self, num_slots: int) -> NDArray[np.intp]:
        """Number the kinds of workers: (num_slots,); slots without a worker have the first one's. Not to be written to."""
        if self._numbers is None or len(self._numbers) != num_slots:
            self._numbers = np.zeros(num_slots, dtype=np.intp)
            numbers: dict[bytes, int] = {}
            self._kinds = []
            for slot, (_, kind) in self._workers.items():
                if kind.key not in numbers:
                    numbers[kind.key] = len(numbers)
                    self._kinds.append(kind)
                self._numbers[slot] = numbers[kind.key]
            fits = [[self._reason(one, other) is None for other in self._kinds] for one in self._kinds]
            self.fits = np.array(fits, dtype=np.bool_)
            self._all_fit = bool(self.fits.all())
            self._setups_s.clear()
        return self._numbers

    def takers(self, producer: int | None, num_slots: int) -> NDArray[np.bool_]:
        """Mask (num_slots,) those who can take over what the worker in this slot has computed; all where nobody is (any more)."""
        kinds = self.kinds(num_slots)
        if producer is None or producer not in self._workers:
            return np.ones(num_slots, dtype=np.bool_)
        return np.asarray(self.fits[kinds[producer]][kinds], dtype=np.bool_)

    def setups_s(self, producer: int, num_slots: int) -> NDArray[np.float64] | None:
        """Say what it takes each taker until it first reads the KV of the worker in this slot, in seconds.

        Returns:
            (num_slots,), the same object as long as nobody comes, changes or goes, not to be written to; None where it
            takes nobody any time, or nobody is there (any more).
        """
        kinds = self.kinds(num_slots)
        if producer not in self._workers:
            return None
        number = int(kinds[producer])
        if number not in self._setups_s:
            one = self._kinds[number]
            by_kind = np.array([_setup_s(one, other) for other in self._kinds]) * self.fits[number]
            setups_s = np.zeros(num_slots)
            for slot, (instance, _) in self._workers.items():
                if instance.role is not Role.PREFILL:
                    setups_s[slot] = by_kind[kinds[slot]]
            self._setups_s[number] = setups_s if setups_s.any() else None
        return self._setups_s[number]

    def producers(self, ready: NDArray[np.bool_], takers: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mask those of `ready` (num_slots,) whose prompts one of `takers` (num_slots,) can take over."""
        kinds = self.kinds(len(ready))
        if self._all_fit and np.count_nonzero(takers):
            return ready
        present = np.bincount(kinds[takers], minlength=len(self._kinds)) > 0
        fits = np.asarray((self.fits & present).any(axis=1))
        return np.logical_and(ready, fits[kinds])

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
        reasons = [
            self._reason(kind, group.kind) if hands_over else self._reason(group.kind, kind)
            for group in others
        ]
        if None in reasons:
            return None
        does = "go on with its prompts" if hands_over else "hand it prompts"
        count = sum(group.count for group in others)
        return f"none of {count} workers can {does}; {others[0].name}: {reasons[0]}"

    def check(self) -> None:
        """Raise AssertionError where too much is remembered, or kinds and workers disagree."""
        assert len(self._reasons) <= _REASONS_MAX, f"{len(self._reasons)} pairs of kinds: past the bound"
        if self._numbers is not None:
            for slot, (_, kind) in self._workers.items():
                assert self._kinds[self._numbers[slot]].key == kind.key, f"slot {slot}: its kind"

    def _grouped(self) -> "dict[tuple[bool, bytes], _Group]":
        """Group workers by whether they hand over, and by kind."""
        if self._groups is None:
            self._groups = {}
            for instance, kind in self._workers.values():
                key = instance.role is Role.PREFILL, kind.key
                self._groups.setdefault(key, _Group(kind, instance.name)).count += 1
        return self._groups

    def _reason(self, producer: _Kind, taker: _Kind) -> str | None:
        key = producer.key, taker.key
        if key not in self._reasons:
            if len(self._reasons) >= _REASONS_MAX:
                self._reasons.clear()
            self._reasons[key] = _unfit(producer, taker)
        return self._reasons[key]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
