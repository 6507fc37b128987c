"""A measured profile: step times of a real engine, and a latency model that interpolates them.

The model interpolates the ratio measured / expected, where "expected" is a roofline or, without one, a linear model
fitted to the same points. Beyond the points the nearest ratio holds, so that the expectation decides the shape.
"""

import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.files import write_whole
from penstock.core.types.events import Tier
from penstock.core.wire import Wire
from penstock.perf.latency import LatencyModel, fit_non_negative, num_pairs


class Latency(StrEnum):
    TTFT = "ttft"
    ITL = "itl"


class CellFit(Wire, frozen=True):
    """One measured cell. `left_out_s` is the prediction of a fit without it; None if too few cells would remain."""

    cell: str
    measured_s: float
    fitted_s: float
    left_out_s: float | None = None
    samples: int = 1
    outliers: int = 0

    @property
    def error(self) -> float:
        return self.fitted_s / self.measured_s - 1

    @property
    def left_out_error(self) -> float | None:
        return None if self.left_out_s is None else self.left_out_s / self.measured_s - 1


class HeldOut(Wire, frozen=True):
    """One point outside the fit, as TTFT or ITL of a request."""

    cell: str
    latency: Latency
    measured_s: float
    predicted_s: float
    samples: int = 1
    outliers: int = 0

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Evaluation(Wire, frozen=True):
    """Errors are predicted / measured - 1. Medians are of absolute errors; None without points."""

    cells: tuple[CellFit, ...]
    held_out: tuple[HeldOut, ...] = ()
    ttft_median_error: float | None = None
    itl_median_error: float | None = None
    left_out_cells: tuple[str, ...] = ()
    """Cells that were not measured, with the reason."""

    @classmethod
    def of(
        cls, cells: Sequence[CellFit], held_out: Sequence[HeldOut], left_out_cells: Sequence[str]
    ) -> "Evaluation":
        errors = {
            latency: [abs(point.error) for point in held_out if point.latency is latency]
            for latency in Latency
        }
        return cls(
            cells=tuple(cells),
            held_out=tuple(held_out),
            ttft_median_error=_median(errors[Latency.TTFT]),
            itl_median_error=_median(errors[Latency.ITL]),
            left_out_cells=tuple(left_out_cells),
        )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


T = TypeVar("T")

PROFILE_SCHEMA = 1
_ROWS_MAX = 1024
_STEP_MAX_S = 3600.0
_TOKENS_MAX = 1_000_000_000
_EQUAL_LENGTH = 1.15
"""Prompts sent to an endpoint as text have roughly the wanted length: lengths within this factor are equal."""


def prefill_name(new_tokens: int, cached_tokens: int = 0, prompts: int = 1) -> str:
    """Format a prefill step, such as `prefill 4 x 64 after 512`."""
    times = f"{prompts} x " if prompts > 1 else ""
    return f"prefill {times}{new_tokens}" + (f" after {cached_tokens}" if cached_tokens else "")


def decode_name(batch: int, context: int) -> str:
    """Format a decode step, such as `decode 16 x 512`."""
    return f"decode {batch} x {context}"


class PrefillPoint(Wire, frozen=True, forbid_unknown_fields=True):
    """One measured step of `prompts` prompts, each `new_tokens` after `cached_tokens`; `seconds` summarizes `samples_s`."""

    new_tokens: int
    seconds: float
    cached_tokens: int = 0
    prompts: int = 1
    samples_s: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return prefill_name(self.new_tokens, self.cached_tokens, self.prompts)


class DecodePoint(Wire, frozen=True, forbid_unknown_fields=True):
    """One measured step of `batch` sequences of `context` tokens each; `seconds` summarizes `samples_s`."""

    batch: int
    context: int
    seconds: float
    samples_s: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return decode_name(self.batch, self.context)


Point = PrefillPoint | DecodePoint


class Profile(Wire, frozen=True, forbid_unknown_fields=True):
    """Measurements of one engine, as written by `penstock profile`.

    `hardware` is a name of the catalogue, `machine` describes the real machine, `measured_at` is UTC. `step_tokens` is the
    most prompt tokens of one step. `tensor_parallel` is None if unknown.
    """

    engine: str
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    kv_bytes_per_token: float = 0.0
    kv_capacity_tokens: int = 0
    machine: str = ""
    schema: int = PROFILE_SCHEMA
    model: str = ""
    hardware: str = ""
    engine_version: str = ""
    measured_at: str = ""
    seed: int = 0
    step_tokens: int | None = None
    evaluation: Evaluation | None = None
    tensor_parallel: int | None = None

    @property
    def points(self) -> "tuple[Point, ...]":
        return (*self.prefill, *self.decode)

    def save(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read a profile.

        Raises:
            ConfigError: the file is missing, not a profile of this schema, or has invalid numbers.
        """
        try:
            profile = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: no such file; `penstock profile` writes one") from error
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: not a profile: {error}; `penstock profile` writes one") from error
        if profile.schema != PROFILE_SCHEMA:
            raise ConfigError(
                f"{path}: schema {profile.schema}, expected {PROFILE_SCHEMA}; profile the engine again"
            )
        _check(profile, str(path))
        return profile


@dataclass(slots=True)
class LinearPrior:
    """A linear latency model: sums of non-negative costs.

    prefill: seconds per (step, new token, attended pair, cached token, whose KV is read)
    decode:  seconds per (step, sequence, context token)
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    kv_bytes_per_token: float = 0.0
    kv_capacity_tokens: int = 0

    @classmethod
    def fit(cls, profile: Profile) -> "LinearPrior":
        """Fit to a profile by non-negative least squares of the relative error."""
        prefill = _fit_positive(
            [
                (1.0, p.new_tokens, num_pairs(p.new_tokens, p.cached_tokens), p.cached_tokens)
                for p in _alone(profile)
            ],
            [p.seconds for p in _alone(profile)],
            always=3,
        )
        decode = _fit_positive(
            [(1.0, p.batch, p.batch * p.context) for p in profile.decode],
            [p.seconds for p in profile.decode],
            always=2,
        )
        return cls(prefill, decode, profile.kv_bytes_per_token, profile.kv_capacity_tokens)

    def kv_held_tokens(self, tokens: float) -> float:
        return tokens

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        return self.prefill_batch_s([(new_tokens, cached_tokens)])

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        base, per_token, per_pair, per_cached = self.prefill
        tokens, cached = sum(new for new, _ in chunks), sum(cached for _, cached in chunks)
        pairs = sum(num_pairs(new, before) for new, before in chunks)
        return base + per_token * tokens + per_pair * pairs + per_cached * cached

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        base, per_sequence, per_token = self.decode
        return base + per_sequence * batch + per_token * context_tokens

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Add both, less the cost of one step."""
        saved_s = min(self.prefill[0], self.decode[0])
        return self.prefill_batch_s(chunks) + self.decode_step_s(batch, context_tokens) - saved_s


def _fit_positive(
    rows: Sequence[tuple[float, ...]], seconds: Sequence[float], *, always: int
) -> tuple[float, ...]:
    """Fit like `fit_non_negative`, so that every step costs something.

    Noise can leave the term of cached tokens alone; then steps without cached tokens would cost nothing.

    Args:
        rows: one tuple of terms per measurement.
        seconds: the measurements.
        always: how many leading terms are above 0 in every step.
    """
    terms = fit_non_negative(rows, seconds)
    if sum(terms[:always]) > 0:
        return terms
    (per_unit,) = fit_non_negative([(row[1],) for row in rows], seconds)
    return (0.0, per_unit, *(0.0 for _ in terms[2:]))


class StepPrices(Protocol):
    """The step times of `LatencyModel`."""

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float: ...

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float: ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float: ...

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float: ...


class ProfiledModel:
    """A `LatencyModel` that interpolates a profile. Immutable after construction."""

    def __init__(self, profile: Profile, prior: LatencyModel | None = None) -> None:
        """Prepare the interpolation.

        Args:
            profile: at least one prefill and one decode point.
            prior: the expectation, a roofline; None fits a `LinearPrior` to the points.

        Raises:
            ConfigError: no points, or invalid numbers.
        """
        _check(profile, f"profile of {profile.engine}")
        self._prior = prior
        self._expected: StepPrices = LinearPrior.fit(profile) if prior is None else prior
        self.kv_bytes_per_token = profile.kv_bytes_per_token or (prior.kv_bytes_per_token if prior else 0.0)
        self.kv_capacity_tokens = profile.kv_capacity_tokens or (prior.kv_capacity_tokens if prior else 0)
        self._prefill_ratio = self._ratios(_alone(profile))
        self._contexts = _columns(point.context for point in profile.decode)
        self._batches = sorted({p.batch for p in profile.decode})
        self._grid = self._decode_grid(profile.decode)
        self._row = lru_cache(maxsize=_ROWS_MAX)(self._make_row)
        self._extra_prompt_s = 0.0
        self._extra_prompt_s = self._measured_extra_prompt_s(profile.prefill)

    def kv_held_tokens(self, tokens: float) -> float:
        return tokens if self._prior is None else self._prior.kv_held_tokens(tokens)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        if new_tokens <= 0:
            return 0.0
        return self._prefill_ratio_at(new_tokens) * self._expected.prefill_s(new_tokens, cached_tokens)

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Expected seconds, scaled by the ratio at the prompts' joint length, plus a cost per further prompt."""
        computed = [new for new, _ in chunks if new > 0]
        if not computed:
            return 0.0
        scaled = self._prefill_ratio_at(sum(computed)) * self._expected.prefill_batch_s(chunks)
        return scaled + self._extra_prompt_s * (len(computed) - 1)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Interpolate linearly in context and in batch."""
        if batch <= 0:
            return 0.0
        batches = self._batches
        context = context_tokens / batch
        upper = bisect_left(batches, batch)
        if upper == 0 or upper == len(batches):
            return self._at(batch, context)
        low, high = batches[upper - 1], batches[upper]
        weight = (batch - low) / (high - low)
        return (1 - weight) * self._at(low, context) + weight * self._at(high, context)

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Add both, less the expected saving of a joint step."""
        prefill, decode = self.prefill_batch_s(chunks), self.decode_step_s(batch, context_tokens)
        if not prefill or not decode:
            return prefill + decode
        expected = self._expected
        apart_s = expected.prefill_batch_s(chunks) + expected.decode_step_s(batch, context_tokens)
        return (prefill + decode) * expected.mixed_step_s(chunks, batch, context_tokens) / apart_s

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        if self._prior is None:
            raise ConfigError("onboard_s: a profile has no tiers; give the model's roofline as its prior")
        return self._prior.onboard_s(num_bytes, tier)

    def point_s(self, point: Point) -> float:
        """Predict the step of a point."""
        if isinstance(point, DecodePoint):
            return self.decode_step_s(point.batch, point.batch * point.context)
        if point.prompts == 1:
            return self.prefill_s(point.new_tokens, point.cached_tokens)
        return self.prefill_batch_s([(point.new_tokens, point.cached_tokens)] * point.prompts)

    def _prefill_ratio_at(self, new_tokens: int) -> float:
        tokens, ratios = self._prefill_ratio
        return float(np.exp(np.interp(np.log(new_tokens), tokens, ratios)))

    def _ratios(self, points: Sequence[PrefillPoint]) -> tuple[np.ndarray, np.ndarray]:
        """Give (log new tokens, log measured / expected); points of nearly equal length are averaged."""
        groups = nearly_equal(points, lambda point: point.new_tokens)
        tokens = [np.mean([np.log(point.new_tokens) for point in group]) for group in groups]
        return np.array(tokens), np.array([np.mean([self._log_ratio(p) for p in group]) for group in groups])

    def _log_ratio(self, point: PrefillPoint) -> float:
        expected_s = self._expected.prefill_s(point.new_tokens, point.cached_tokens)
        return float(np.log(point.seconds / expected_s))

    def _measured_extra_prompt_s(self, points: Sequence[PrefillPoint]) -> float:
        """Give the seconds of each further prompt in a step beside its tokens, from points with several prompts."""
        extra = [(p.seconds - self.point_s(p)) / (p.prompts - 1) for p in points if p.prompts > 1]
        return max(0.0, float(np.median(extra))) if extra else 0.0

    def _decode_grid(self, points: Sequence[DecodePoint]) -> np.ndarray:
        """(batches, contexts) seconds: measured, else expected times the nearest ratio of the same batch."""
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

    def _at(self, batch: int, context: float) -> float:
        """Interpolate a row of the grid at a context, linearly between and beyond the columns."""
        contexts, values = self._contexts, self._row(batch)
        if context > contexts[-1] or context < contexts[0]:
            column = -1 if context > contexts[-1] else 0
            edge_s = self._expected.decode_step_s(batch, batch * contexts[column])
            return float(values[column]) * self._expected_decode_s(batch, batch * context) / edge_s
        return float(np.interp(context, contexts, values))

    def _make_row(self, batch: int) -> np.ndarray:
        """(contexts,) seconds: measured, else the nearest measured batch scaled by the expectation."""
        row = min(bisect_left(self._batches, batch), len(self._batches) - 1)
        nearest = self._batches[row]
        values: np.ndarray = self._grid[row]
        if nearest == batch:
            return values
        expected = self._expected.decode_step_s
        scale = [expected(batch, batch * c) / expected(nearest, nearest * c) for c in self._contexts]
        scaled: np.ndarray = values * np.array(scale)
        return scaled

    def _expected_decode_s(self, batch: int, context_tokens: float) -> float:
        """Expected decode seconds at a fractional context, by linear interpolation."""
        low = int(context_tokens)
        low_s = self._expected.decode_step_s(batch, low)
        share = context_tokens - low
        return low_s + share * (self._expected.decode_step_s(batch, low + 1) - low_s) if share else low_s


def _columns(contexts: Iterable[int]) -> list[int]:
    return [round(np.mean(group)) for group in nearly_equal(set(contexts), lambda context: context)]


def nearly_equal(items: Iterable[T], length: Callable[[T], int]) -> list[list[T]]:
    """Group items of nearly equal length, shortest first."""
    groups: list[list[T]] = []
    for item in sorted(items, key=length):
        if groups and length(item) <= length(groups[-1][0]) * _EQUAL_LENGTH:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _alone(profile: Profile) -> list[PrefillPoint]:
    return [point for point in profile.prefill if point.prompts == 1]


def _check(profile: Profile, source: str) -> None:
    if not _alone(profile) or not profile.decode:
        raise ConfigError(
            f"{source}: {len(_alone(profile))} prefill and {len(profile.decode)} decode points; needs at least one of each"
        )
    numbers = [
        ("kv_bytes_per_token", profile.kv_bytes_per_token, 0),
        ("kv_capacity_tokens", profile.kv_capacity_tokens, 0),
        ("step_tokens", 1 if profile.step_tokens is None else profile.step_tokens, 1),
    ]
    for prompt in profile.prefill:
        numbers += [
            (f"{prompt.name}: new_tokens", prompt.new_tokens, 1),
            (f"{prompt.name}: cached_tokens", prompt.cached_tokens, 0),
            (f"{prompt.name}: prompts", prompt.prompts, 1),
        ]
    for step in profile.decode:
        numbers += [(f"{step.name}: batch", step.batch, 1), (f"{step.name}: context", step.context, 0)]
    for name, value, least in numbers:
        if not least <= value <= _TOKENS_MAX:
            raise ConfigError(f"{source}: {name}: must be from {least} to {_TOKENS_MAX:,}, got {value}")
    for point in profile.points:
        for name, seconds in (("seconds", point.seconds), *(("samples_s", s) for s in point.samples_s)):
            if not 0 < seconds <= _STEP_MAX_S:
                raise ConfigError(
                    f"{source}: {point.name}: {name} must be > 0 and <= {_STEP_MAX_S:g}, got {seconds:g}"
                )
