"""What each worker of a model says its work takes, as columns by slot."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Instance, Prices, Tier
from penstock.seams import PriceColumns

_SCALARS = (
    "prefill_step_s",
    "prefill_token_s",
    "prefill_pair_s",
    "decode_step_s",
    "decode_sequence_s",
    "decode_token_s",
)
_BATCH = len(_SCALARS)
_TIERS = _BATCH + 1

UNKNOWN = Prices(
    prefill_step_s=3.5e-3,
    prefill_token_s=2e-5,
    prefill_pair_s=6.5e-10,
    decode_step_s=6.5e-3,
    decode_sequence_s=7e-6,
    decode_token_s=4.2e-8,
    onboard_token_s=(0.0, 3.3e-6, 2.6e-5, 1.3e-4),
)
"""Where no worker of a model says anything: an 8B model in bf16 on one H100 by the roofline. Alike for all workers,
they still weigh work against work."""


class PriceTable:
    """Prices by worker slot; who has said none is taken for the median of those who have. One event loop owns it.

    A change costs O(1); medians are found anew when prices are next asked for.
    """

    def __init__(self, num_slots: int) -> None:
        self._table = np.zeros((_TIERS + len(Tier), num_slots))
        self._known = np.zeros(num_slots, dtype=np.bool_)
        self._columns: PriceColumns | None = None

    def put(self, slot: int, instance: Instance) -> None:
        """Take what a worker says."""
        prices = instance.prices
        self._columns = None
        self._known[slot] = prices is not None
        if prices is not None:
            self._table[:, slot] = _row(prices)
        self._table[_BATCH, slot] = max(instance.engine.max_batch_tokens, 1)

    def remove(self, slot: int) -> None:
        """Forget a worker."""
        self._columns = None
        self._known[slot] = False

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = num_slots - len(self._known)
        self._table = np.pad(self._table, ((0, 0), (0, more)))
        self._known = np.pad(self._known, (0, more))
        self._columns = None

    def columns(self) -> PriceColumns:
        """Give the prices of all slots; they cannot be written to."""
        if self._columns is None:
            self._columns = self._fill()
        return self._columns

    def check(self) -> None:
        """Raise AssertionError where a price is none."""
        table = self._table[:, self._known]
        assert np.isfinite(table).all(), "prices: finite"
        assert (table >= 0).all(), "prices: never below nothing"

    def _fill(self) -> PriceColumns:
        table, known = self._table.copy(), self._known
        batch = table[_BATCH].copy()
        others = np.median(table[:, known], axis=1) if known.any() else np.array(_row(UNKNOWN))
        table[:, ~known] = others[:, None]
        table[_BATCH] = np.maximum(batch, 1.0)
        table.flags.writeable = False
        scalars = {name: table[row] for row, name in enumerate(_SCALARS)}
        return PriceColumns(**scalars, batch_tokens=table[_BATCH], onboard_token_s=table[_TIERS:])


def _row(prices: Prices) -> NDArray[np.float64]:
    """Lay prices out as rows; what is not finite or below nothing counts as nothing."""
    tiers = (*prices.onboard_token_s, *(0.0,) * len(Tier))[: len(Tier)]
    row = np.array([*(getattr(prices, name) for name in _SCALARS), 0.0, *tiers])
    return np.where(np.isfinite(row), np.maximum(row, 0.0), 0.0)
