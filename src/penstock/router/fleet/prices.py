"""What the work of a model's workers takes: their published prices as columns by slot, and the model's recent traffic."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.core.types.instances import Instance, Prices
from penstock.perf.topology import NetworkPath
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
_ROUND_TRIP, _BYTE, _AT_ONCE, _PLACES = _BATCH + 1, _BATCH + 2, _BATCH + 3, _BATCH + 4
_TIERS = _BATCH + 5
_PLACES_UNKNOWN = 1e9

PRICE_S_MAX = 3600.0
"""Upper bound of every price, so that products stay finite."""
UNKNOWN = Prices(
    prefill_step_s=3.5e-3,
    prefill_token_s=2e-5,
    prefill_pair_s=6.5e-10,
    decode_step_s=6.5e-3,
    decode_sequence_s=7e-6,
    decode_token_s=4.2e-8,
    onboard_token_s=(0.0, 3.3e-6, 2.6e-5, 1.3e-4),
)
"""Prices where no worker publishes any: an 8B model in bf16 on one H100 by the roofline."""


class PriceTable:
    """Prices by worker slot; a worker without prices gets the medians of the others. One event loop owns it.

    A change costs O(1). Medians are computed when prices are next asked for.
    """

    def __init__(self, num_slots: int) -> None:
        self._table = np.zeros((_TIERS + len(Tier), num_slots))
        self._known = np.zeros(num_slots, dtype=np.bool_)
        self.interleaves_tenants = np.zeros(num_slots, dtype=np.bool_)
        """(num_slots,) as in `EngineInfo`."""
        self._filled = self._table
        self._columns: PriceColumns | None = None

    def put(self, slot: int, instance: Instance, path: NetworkPath | None = None) -> None:
        """Take a worker's prices, and the network path from this router; None costs nothing."""
        prices = instance.prices
        self._columns = None
        self._known[slot] = prices is not None
        if prices is not None:
            self._table[:, slot] = _row(prices)
        self._table[_BATCH, slot] = max(instance.engine.max_batch_tokens, 1)
        self.move(slot, path)
        self.interleaves_tenants[slot] = instance.engine.interleaves_tenants
        self._table[_AT_ONCE, slot] = instance.engine.prompts_at_once
        self._table[_PLACES, slot] = instance.engine.max_running_requests or _PLACES_UNKNOWN

    def move(self, slot: int, path: NetworkPath | None) -> None:
        """Take the network path from this router to a worker; None costs nothing."""
        row = (0.0, 0.0) if path is None else (2 * path.latency_s, 1 / path.bandwidth_bytes_per_s)
        self._table[[_ROUND_TRIP, _BYTE], slot] = row
        if self._columns is not None:
            self._filled[[_ROUND_TRIP, _BYTE], slot] = row

    def remove(self, slot: int) -> None:
        """Forget a worker."""
        self._columns = None
        self._known[slot] = False

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = num_slots - len(self._known)
        self._table = np.pad(self._table, ((0, 0), (0, more)))
        self._known = np.pad(self._known, (0, more))
        self.interleaves_tenants = np.pad(self.interleaves_tenants, (0, more))
        self._columns = None

    def columns(self) -> PriceColumns:
        """Give the prices of all slots; they cannot be written to."""
        if self._columns is None:
            self._columns = self._fill()
        return self._columns

    def check(self) -> None:
        """Raise AssertionError where a price is no finite time."""
        table = self._table[:, self._known]
        assert np.isfinite(table).all(), "prices: finite"
        assert (table >= 0).all(), "prices: never below nothing"
        if self._columns is not None:
            assert (self._filled[:_BATCH, self._known] == table[:_BATCH]).all(), "prices: as published"

    def _fill(self) -> PriceColumns:
        table, known = self._table.copy(), self._known
        own = table[_BATCH:_TIERS].copy()
        others = np.median(table[:, known], axis=1) if known.any() else np.array(_row(UNKNOWN))
        table[:, ~known] = others[:, None]
        table[_BATCH:_TIERS] = own
        sizes = [_BATCH, _AT_ONCE, _PLACES]
        table[sizes] = np.maximum(table[sizes], 1.0)
        self._filled, shown = table, table.view()
        shown.flags.writeable = False
        scalars = {name: shown[row] for row, name in enumerate(_SCALARS)}
        return PriceColumns(
            **scalars,
            batch_tokens=shown[_BATCH],
            prompts_at_once=shown[_AT_ONCE],
            onboard_token_s=shown[_TIERS:],
            round_trip_s=shown[_ROUND_TRIP],
            byte_s=shown[_BYTE],
            batch_requests=shown[_PLACES],
        )


def _row(prices: Prices) -> NDArray[np.float64]:
    """Lay prices out as rows, clipped to 0 and `PRICE_S_MAX`; what is not finite becomes 0."""
    tiers = (*prices.onboard_token_s, *(0.0,) * len(Tier))[: len(Tier)]
    row = np.array([*(getattr(prices, name) for name in _SCALARS), *(0.0,) * (_TIERS - _BATCH), *tiers])
    return np.where(np.isfinite(row), row.clip(0.0, PRICE_S_MAX), 0.0)


_RATE_WINDOW_S = 30.0
_LENGTH_WINDOW_S = 600.0
_FIRST_GUESS_TOKENS = 256.0


@dataclass(slots=True)
class Traffic:
    """Exponentially forgetting averages, on loop time. One event loop owns it.

    `mean_output_tokens` begins with a guess that weighs as much as one answer.
    """

    _arrivals: float = 0.0
    _arrivals_at_s: float = -math.inf
    _answers: float = 1.0
    _tokens: float = _FIRST_GUESS_TOKENS
    _ended_at_s: float = -math.inf

    @property
    def mean_output_tokens(self) -> float:
        return self._tokens / self._answers

    def arrived(self, now_s: float, requests: int = 1) -> None:
        """Count requests."""
        self._arrivals = self._arrivals * _kept(now_s - self._arrivals_at_s, _RATE_WINDOW_S) + requests
        self._arrivals_at_s = now_s

    def ended(self, output_tokens: int, now_s: float) -> None:
        """Count a completed answer."""
        kept = _kept(now_s - self._ended_at_s, _LENGTH_WINDOW_S) if self._ended_at_s > -math.inf else 1.0
        self._answers = self._answers * kept + 1.0
        self._tokens = self._tokens * kept + output_tokens
        self._ended_at_s = now_s

    def rate_per_s(self, now_s: float) -> float:
        """Give the request rate; too low in the first `_RATE_WINDOW_S`."""
        return self._arrivals * _kept(now_s - self._arrivals_at_s, _RATE_WINDOW_S) / _RATE_WINDOW_S

    def check(self) -> None:
        """Raise AssertionError where an average is none."""
        assert self._answers >= 1.0, f"answers: {self._answers}"
        assert self._arrivals >= 0.0, f"arrivals: {self._arrivals}"


def _kept(passed_s: float, window_s: float) -> float:
    return math.exp(-max(passed_s, 0.0) / window_s)
