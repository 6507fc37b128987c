"""The LoRA adapters of one model: which workers hold each."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, ModelCard

_log = get_logger()


class Adapters:
    """Holders of each adapter by worker slot. Further adapters than `adapters_max` are left out. One event loop owns it."""

    def __init__(self, num_slots: int, adapters_max: int) -> None:
        """Know no adapter."""
        self._num_slots = num_slots
        self._adapters_max = adapters_max
        self._holders: dict[str, NDArray[np.bool_]] = {}
        self._by_slot: dict[int, tuple[str, ...]] = {}
        self._ready_holders: Counter[str] = Counter()  # no zeros
        self._cards: tuple[ModelCard, Mapping[str, ModelCard]] | None = (
            None  # None once `_ready_holders` changed
        )

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._holders

    def put(self, slot: int, instance: Instance, *, is_ready: bool) -> None:
        """Take the adapters of the worker in a slot, in place of what the slot had."""
        self.remove(slot, is_ready=is_ready)
        known: list[str] = []
        for adapter in instance.adapters:
            holders = self._holders.get(adapter)
            if holders is None:
                if len(self._holders) >= self._adapters_max:
                    _log.warning(
                        "adapter_left_out",
                        adapter=adapter,
                        worker=instance.name,
                        adapters_max=self._adapters_max,
                    )
                    continue
                holders = self._holders[adapter] = np.zeros(self._num_slots, dtype=np.bool_)
            holders[slot] = True
            known.append(adapter)
        self._by_slot[slot] = tuple(known)
        if is_ready:
            self.count_ready(slot, +1)

    def remove(self, slot: int, *, is_ready: bool) -> None:
        """Forget the adapters of the worker in a slot."""
        if is_ready:
            self.count_ready(slot, -1)
        for adapter in self._by_slot.pop(slot, ()):
            holders = self._holders[adapter]
            holders[slot] = False
            if not holders.any():
                del self._holders[adapter]

    def count_ready(self, slot: int, change: int) -> None:
        """Count a worker that is ready from now on (1), or no longer (-1)."""
        for adapter in self._by_slot.get(slot, ()):
            before = self._ready_holders[adapter]
            self._ready_holders[adapter] += change
            if not self._ready_holders[adapter]:
                del self._ready_holders[adapter]  # adapters come and go as long as the process lives
            if not before or before + change == 0:
                self._cards = None

    def among(self, ready: NDArray[np.bool_], adapter: str) -> NDArray[np.bool_]:
        """Mask (num_slots,) the holders of an adapter among `ready`, in an array of its own."""
        holders = self._holders.get(adapter)
        return np.zeros_like(ready) if holders is None else ready & holders

    def cards(self, card: ModelCard) -> Mapping[str, ModelCard]:
        """Give the card of each adapter with a ready holder, by name; the same object until that changes."""
        if self._cards is None or self._cards[0] is not card:
            self._cards = card, {adapter: card.adapted(adapter) for adapter in self._ready_holders}
        return self._cards[1]

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = (0, num_slots - self._num_slots)
        self._num_slots = num_slots
        self._holders = {adapter: np.pad(holders, more) for adapter, holders in self._holders.items()}

    def check(self, ready: NDArray[np.bool_], listed: Mapping[int, tuple[str, ...]]) -> None:
        """Raise AssertionError where counts disagree with ready workers, or with the adapters that workers list, by slot."""
        counts = {adapter: int((holders & ready).sum()) for adapter, holders in self._holders.items()}
        assert {adapter: count for adapter, count in counts.items() if count} == self._ready_holders, (
            "adapters: ready holders are counted"
        )
        assert len(self._holders) <= self._adapters_max, f"{len(self._holders)} adapters: past the bound"
        for adapter, holders in self._holders.items():
            expected = {slot for slot, adapters in listed.items() if adapter in adapters}
            slots = set(np.flatnonzero(holders).tolist())
            assert slots, f"adapter {adapter}: no holder"
            # a worker that came past the bound is no holder until it is put again
            assert slots <= expected, f"adapter {adapter}: {slots} are said to have it, {expected} have"
