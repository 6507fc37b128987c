"""A measured profile: points of a real engine, and a model that goes through them.

Between the points it interpolates the ratio of measured to expected seconds, where "expected" is a roofline or,
for an engine nobody has described, a straight line fitted to the same points. Beyond the points the nearest
ratio holds, so that the prior's shape decides and not a polynomial's tail.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.types import Tier
from penstock.core.wire import Wire
from penstock.perf.latency import LatencyModel, Link

PROFILE_SCHEMA = 1


class PrefillPoint(Wire, frozen=True):
    new_tokens: int
    seconds: float
    cached_tokens: int = 0


class DecodePoint(Wire, frozen=True):
    """One step of `batch` sequences of `context` tokens each."""

    batch: int
    context: int
    seconds: float


class Profile(Wire, frozen=True):
    """What was measured of one engine, as `penstock profile` writes it."""

    engine: str
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    kv_bytes_per_token: float = 0.0
    kv_capacity_tokens: int = 0
    machine: str = ""
    schema: int = PROFILE_SCHEMA

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read a profile.

        Raises:
            ConfigError: no such file, or not a profile of this schema.
        """
        try:
            profile = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: no such file; `penstock profile` writes one") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: not a profile: {error}; `penstock profile` writes one") from error
        if profile.schema != PROFILE_SCHEMA:
            raise ConfigError(
                f"{path}: schema {profile.schema}, expected {PROFILE_SCHEMA}; profile the engine again"
            )
        return profile


@dataclass(slots=True)
class LinearPrior:
    """The plainest engine: costs per step, token, attended pair, sequence and context token, none negative."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    kv_bytes_per_token: float = 0.0
    kv_capacity_tokens: int = 0

    @classmethod
    def fit(cls, profile: Profile) -> "LinearPrior":
        """Fit by non-negative least squares of the relative error."""
        prefill = _fit(
            [(1.0, p.new_tokens, _pairs(p.new_tokens, p.cached_tokens)) for p in profile.prefill],
            [p.seconds for p in profile.prefill],
        )
        decode = _fit(
            [(1.0, p.batch, p.batch * p.context) for p in profile.decode], [p.seconds for p in profile.decode]
        )
        return cls(prefill, decode, profile.kv_bytes_per_token, profile.kv_capacity_tokens)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        base, per_token, per_pair = self.prefill
        return base + per_token * new_tokens + per_pair * _pairs(new_tokens, cached_tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        base, per_sequence, per_token = self.decode
        return base + per_sequence * batch + per_token * context_tokens


class StepPrices(Protocol):
    """The two prices an expectation must give."""

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float: ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float: ...


class ProfiledModel:
    """A `LatencyModel` through a profile's points. Stateless after construction."""

    def __init__(self, profile: Profile, prior: LatencyModel | None = None) -> None:
        """Prepare the interpolation.

        Args:
            profile: at least one prefill and one decode point.
            prior: what is expected without measuring, a roofline; None fits a `LinearPrior` to the points.

        Raises:
            ConfigError: no points, or seconds that are not positive.
        """
        _check(profile)
        self._prior = prior
        self._expected: StepPrices = LinearPrior.fit(profile) if prior is None else prior
        self.kv_bytes_per_token = profile.kv_bytes_per_token or (prior.kv_bytes_per_token if prior else 0.0)
        self.kv_capacity_tokens = profile.kv_capacity_tokens or (prior.kv_capacity_tokens if prior else 0)
        self._prefill_ratio = self._ratios(profile.prefill)
        self._contexts = sorted({p.context for p in profile.decode})
        self._batches = sorted({p.batch for p in profile.decode})
        self._grid = self._decode_grid(profile.decode)
        self._rows: dict[int, np.ndarray] = {}  # at most one for each batch there can be

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        if new_tokens <= 0:
            return 0.0
        return self._prefill_ratio_at(new_tokens) * self._expected.prefill_s(new_tokens, cached_tokens)

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Price prompts as the prior does, scaled as one of their joint length was measured.

        Without a prior: as one of their joint length, plus the attention each would not have shared.
        """
        total = sum(new for new, _ in chunks)
        if total <= 0:
            return 0.0
        if self._prior is not None:
            return self._prefill_ratio_at(total) * self._prior.prefill_batch_s(chunks)
        joint = self.prefill_s(total)
        expected = self._expected.prefill_s(total, 0)
        per_pair = (self._expected.prefill_s(total, total) - expected) / max(1, total * total)
        pairs = sum(_pairs(new, cached) for new, cached in chunks) - _pairs(total, 0)
        floor = self.prefill_s(max(new for new, _ in chunks))
        return max(floor, joint * (1 + per_pair * pairs / expected))

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Interpolate linearly in context, and between the batches measured."""
        if batch <= 0:
            return 0.0
        contexts, row, context = self._contexts, self._row(batch), context_tokens / batch
        if contexts[0] <= context <= contexts[-1]:
            return float(np.interp(context, contexts, row))
        column = 0 if context < contexts[0] else -1
        expected = self._expected.decode_step_s
        return (
            float(row[column]) * expected(batch, context_tokens) / expected(batch, batch * contexts[column])
        )

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Add both, less what the prior saves by doing them in one step; without one, less the fixed cost."""
        prefill, decode = self.prefill_batch_s(chunks), self.decode_step_s(batch, context_tokens)
        if not prefill or not decode:
            return prefill + decode
        if self._prior is not None:
            apart_s = self._prior.prefill_batch_s(chunks) + self._prior.decode_step_s(batch, context_tokens)
            together_s = self._prior.mixed_step_s(chunks, batch, context_tokens)
            return (prefill + decode) * together_s / apart_s
        saved = min(self.decode_step_s(1, 0), prefill, decode)
        return prefill + decode - saved

    def transfer_s(self, num_bytes: float, link: Link) -> float:
        return self._need_prior("transfer_s").transfer_s(num_bytes, link)

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        return self._need_prior("onboard_s").onboard_s(num_bytes, tier)

    def residuals(self, profile: Profile) -> dict[str, float]:
        """Give predicted / measured - 1 for each point of `profile`."""
        found = {
            f"prefill {p.new_tokens}+{p.cached_tokens}": self.prefill_s(p.new_tokens, p.cached_tokens)
            / p.seconds
            - 1
            for p in profile.prefill
        }
        return found | {
            f"decode {p.context}x{p.batch}": self.decode_step_s(p.batch, p.batch * p.context) / p.seconds - 1
            for p in profile.decode
        }

    def _prefill_ratio_at(self, new_tokens: int) -> float:
        tokens, ratios = self._prefill_ratio
        return float(np.exp(np.interp(np.log(new_tokens), tokens, ratios)))

    def _need_prior(self, what: str) -> LatencyModel:
        if self._prior is None:
            raise ConfigError(
                f"{what}: a profile has no links or tiers; give the model's roofline as its prior"
            )
        return self._prior

    def _ratios(self, points: Sequence[PrefillPoint]) -> tuple[np.ndarray, np.ndarray]:
        """Log of measured / expected by log of new tokens; points of equal length are averaged."""
        by_tokens: dict[int, list[float]] = {}
        for point in points:
            ratio = point.seconds / self._expected.prefill_s(point.new_tokens, point.cached_tokens)
            by_tokens.setdefault(point.new_tokens, []).append(float(np.log(ratio)))
        tokens = sorted(by_tokens)
        return np.log(tokens), np.array([np.mean(by_tokens[n]) for n in tokens])

    def _decode_grid(self, points: Sequence[DecodePoint]) -> np.ndarray:
        """(batches, contexts) seconds: measured, or expected times the nearest ratios of the same batch."""
        expected = self._expected.decode_step_s
        grid = np.zeros((len(self._batches), len(self._contexts)))
        logs = np.log1p(self._contexts)
        for row, batch in enumerate(self._batches):
            mine = sorted((p.context, p.seconds) for p in points if p.batch == batch)
            ratios = [np.log(seconds / expected(batch, batch * context)) for context, seconds in mine]
            filled = np.interp(logs, np.log1p([context for context, _ in mine]), ratios)
            grid[row] = [
                expected(batch, batch * context) * np.exp(ratio)
                for context, ratio in zip(self._contexts, filled, strict=True)
            ]
        return grid

    def _row(self, batch: int) -> np.ndarray:
        """(contexts,) seconds of a batch: measured, between two that were, or scaled as is expected."""
        row = self._rows.get(batch)
        if row is None:
            row = self._rows[batch] = self._make_row(batch)
        return row

    def _make_row(self, batch: int) -> np.ndarray:
        batches, grid = self._batches, self._grid
        upper = bisect_left(batches, batch)
        if 0 < upper < len(batches):
            low, high = batches[upper - 1], batches[upper]
            weight = (batch - low) / (high - low)
            between: np.ndarray = (1 - weight) * grid[upper - 1] + weight * grid[upper]
            return between
        edge = min(upper, len(batches) - 1)
        near, expected = batches[edge], self._expected.decode_step_s
        scale = [expected(batch, batch * c) / expected(near, near * c) for c in self._contexts]
        beyond: np.ndarray = grid[edge] * np.array(scale)
        return beyond


def _check(profile: Profile) -> None:
    if not profile.prefill or not profile.decode:
        raise ConfigError(
            f"profile of {profile.engine}: {len(profile.prefill)} prefill and {len(profile.decode)} decode points; needs at least one of each"
        )
    points: tuple[PrefillPoint | DecodePoint, ...] = (*profile.prefill, *profile.decode)
    for point in points:
        if point.seconds <= 0:
            raise ConfigError(f"profile of {profile.engine}: {point}: seconds must be > 0")


def _pairs(new: int, cached: int) -> float:
    return new * cached + new * (new + 1) / 2


def _fit(rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Solve non-negative least squares of the relative error by dropping the most negative term until none is."""
    design = np.array(rows) / np.array(seconds)[:, None]
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1
    kept = list(range(3))
    while kept:
        solution = np.linalg.lstsq(design[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
        if solution.min() >= 0:
            break
        kept.pop(int(solution.argmin()))
    out = [0.0, 0.0, 0.0]
    for index, value in zip(kept, solution if kept else (), strict=True):
        out[index] = float(value / scale[index])
    return out[0], out[1], out[2]
