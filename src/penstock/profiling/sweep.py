"""Measures a plan's cells in rounds, so that a temporarily busy machine affects all cells equally."""

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from penstock.core.errors import ConfigError, PenstockError
from penstock.perf.profile import DecodePoint, Point, PrefillPoint
from penstock.profiling.target import Cell, DecodeCell, Limits, PrefillCell, ProfileTarget

CELLS_MIN = 3
"""Least cells of prefill and of decode: the linear fit has three coefficients."""
_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """Cells and repeats of a sweep.

    held_out:    held-out points of each kind
    repeats:     samples per cell, after one warm-up
    max_seconds: no measurement starts after this
    request_timeout_s: for one request to a URL, and for a measurement running at `max_seconds`
    """

    prompt_tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    contexts: tuple[int, ...] = (64, 256, 1024, 2048)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    repeats: int = 7
    held_out: int = 12
    seed: int = 0
    max_seconds: float = 900.0
    request_timeout_s: float = 60.0


QUICK = SweepConfig(
    prompt_tokens=(16, 64, 192, 512, 1024),
    contexts=(64, 512, 1536),
    batches=(1, 4, 16),
    repeats=3,
    held_out=6,
    max_seconds=40.0,
)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """`fitted` and `held_out` are disjoint; `left_out` are cells that cannot be measured, with the reason."""

    fitted: tuple[Cell, ...]
    held_out: tuple[Cell, ...]
    left_out: tuple[str, ...]


def plan_sweep(config: SweepConfig, limits: Limits) -> SweepPlan:
    """Choose the cells.

    Raises:
        ConfigError: too few cells can be measured for a fit.
    """
    fitted: list[Cell] = []
    left_out: list[str] = []
    for cell in _wanted(config, limits):
        reason = limits.refusal(cell) or limits.step_refusal(cell)
        if reason is None:
            fitted.append(cell)
        else:
            left_out.append(f"{cell}: {reason}")
    _check_enough(fitted, left_out)
    return SweepPlan(tuple(fitted), tuple(_draw_held_out(config, limits, fitted)), tuple(left_out))


def _wanted(config: SweepConfig, limits: Limits) -> list[Cell]:
    contexts = sorted(config.contexts)
    prefixes = {context // limits.block_size * limits.block_size for context in contexts[1:]}
    cells: list[Cell] = []
    for new in sorted(config.prompt_tokens):
        cells.append(PrefillCell(new))
        if limits.caches and limits.step_refusal(PrefillCell(new)) is None:
            cells += [PrefillCell(new, cached) for cached in sorted(prefixes - {0})]
    if limits.batches_prompts:
        cells += _batched(config, limits)
    cells += [DecodeCell(batch, context) for batch in sorted(config.batches) for context in contexts]
    return list(dict.fromkeys(cells))


def _batched(config: SweepConfig, limits: Limits) -> list[Cell]:
    """Give, per batch size, the shortest and the longest prompts that fit into one step."""
    cells: list[Cell] = []
    for prompts in sorted(config.batches):
        fitting = [
            new
            for new in sorted(config.prompt_tokens)
            if limits.step_tokens is None or new * prompts <= limits.step_tokens
        ]
        if prompts > 1 and fitting:
            cells += [PrefillCell(fitting[0], prompts=prompts), PrefillCell(fitting[-1], prompts=prompts)]
    return cells


def _draw_held_out(config: SweepConfig, limits: Limits, fitted: list[Cell]) -> list[Cell]:
    """Draw random points within the sweep's range; prompts may take several steps."""
    rng = random.Random(config.seed)
    decode = [cell for cell in fitted if isinstance(cell, DecodeCell)]
    prefill = [cell for cell in fitted if isinstance(cell, PrefillCell) and cell.prompts == 1]
    shortest = min(cell.new_tokens for cell in prefill)
    longest = max(cell.new_tokens + cell.cached_tokens for cell in prefill)
    if limits.step_tokens is None:
        longest = max(cell.new_tokens for cell in prefill)  # longer prompts are chunked in unknown ways
    has_prefixes = any(cell.cached_tokens for cell in prefill)

    def draw_prefill(number: int) -> Cell:
        tokens = _log_uniform(rng, shortest, longest)
        cached = rng.randint(0, tokens - shortest) // limits.block_size * limits.block_size
        return PrefillCell(tokens - cached, cached) if has_prefixes and number % 2 else PrefillCell(tokens)

    def draw_decode(_: int) -> Cell:
        batch = _log_uniform(rng, min(c.batch for c in decode), max(c.batch for c in decode))
        return DecodeCell(
            batch, _log_uniform(rng, min(c.context for c in decode), max(c.context for c in decode))
        )

    drawn: dict[Cell, None] = {}
    for draw in (draw_prefill, draw_decode):
        wanted = len(drawn) + config.held_out
        for _ in range(_ATTEMPTS * config.held_out):
            if len(drawn) >= wanted:
                break
            cell = draw(len(drawn))
            if cell not in fitted and limits.refusal(cell) is None:
                drawn[cell] = None
    return list(drawn)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _check_enough(fitted: list[Cell], left_out: list[str]) -> None:
    prefill = sum(isinstance(cell, PrefillCell) and cell.prompts == 1 for cell in fitted)
    decode = sum(isinstance(cell, DecodeCell) for cell in fitted)
    if min(prefill, decode) < CELLS_MIN:
        why = f" (left out: {'; '.join(left_out[:3])})" if left_out else ""
        raise ConfigError(
            f"{prefill} prefill and {decode} decode cells can be measured, the fit needs {CELLS_MIN} of each{why};"
            " give more --prompt-tokens, --contexts or --batches"
        )


OnProgress = Callable[[int, Cell], None]
"""Called with (measurements done, next cell)."""

_OUTLIER_MADS = 5.0
_OUTLIER_SHARE = 0.2
_P = TypeVar("_P", PrefillPoint, DecodePoint)


@dataclass(slots=True)
class Measured:
    """The points of a sweep: fitted, held out, and cells skipped for lack of time."""

    prefill: list[PrefillPoint] = field(default_factory=list)
    decode: list[DecodePoint] = field(default_factory=list)
    held_out: list[Point] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


async def measure(
    target: ProfileTarget, plan: SweepPlan, config: SweepConfig, on_progress: OnProgress | None = None
) -> Measured:
    """Measure every cell `config.repeats` times after one warm-up.

    The first round goes from cheap to expensive cells, so that a sweep cut short by `config.max_seconds` has a fit; later
    rounds are in random order.

    Raises:
        ConfigError: too few cells for a fit were measured in time.
        EngineError, Unavailable: a measurement failed; the text starts with its cell.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + config.max_seconds
    cells = sorted((*plan.fitted, *plan.held_out), key=_cost)
    samples: dict[Cell, list[Point]] = {cell: [] for cell in cells}
    rng = random.Random(config.seed)
    done = 0
    try:
        async with asyncio.timeout_at(deadline_s + config.request_timeout_s):
            for _ in range(config.repeats + 1):
                for cell in cells:
                    if loop.time() >= deadline_s:
                        return _gather(samples, plan, config)
                    if on_progress is not None:
                        on_progress(done, cell)
                    samples[cell].append(await _sample(target, cell))
                    done += 1
                rng.shuffle(cells)
    except TimeoutError:
        pass
    return _gather(samples, plan, config)


async def _sample(target: ProfileTarget, cell: Cell) -> Point:
    try:
        if isinstance(cell, PrefillCell):
            return await target.prefill(cell)
        return await target.decode(cell)
    except PenstockError as error:
        raise type(error)(f"{cell}: {error.message}") from error


def _gather(samples: dict[Cell, list[Point]], plan: SweepPlan, config: SweepConfig) -> Measured:
    measured = Measured()
    for cell in plan.fitted:
        points = samples[cell]
        if not points:
            measured.left_out.append(f"{cell}: no time left (--max-seconds {config.max_seconds:g})")
        elif isinstance(cell, PrefillCell):
            measured.prefill.append(combine([p for p in points if isinstance(p, PrefillPoint)]))
        else:
            measured.decode.append(combine([p for p in points if isinstance(p, DecodePoint)]))
    for cell in plan.held_out:
        points = samples[cell]
        if points and isinstance(cell, PrefillCell):
            measured.held_out.append(combine([p for p in points if isinstance(p, PrefillPoint)]))
        elif points:
            measured.held_out.append(combine([p for p in points if isinstance(p, DecodePoint)]))
    prefill = sum(point.prompts == 1 for point in measured.prefill)
    if min(prefill, len(measured.decode)) < CELLS_MIN:
        raise ConfigError(
            f"--max-seconds {config.max_seconds:g}: {prefill} prefill and {len(measured.decode)} decode cells were"
            f" measured in that time, the fit needs {CELLS_MIN} of each; allow more, or give shorter --contexts"
        )
    return measured


def combine(points: Sequence[_P]) -> _P:
    """Combine the measurements of a cell to one point: medians without the first, a warm-up."""
    kept = points[1:] or points
    samples_s = tuple(point.seconds for point in kept)
    middle = {
        name: round(statistics.median(getattr(point, name) for point in kept))
        for name in ("new_tokens", "cached_tokens", "context")
        if hasattr(points[0], name)
    }
    return replace(kept[0], seconds=statistics.median(samples_s), samples_s=samples_s, **middle)


def outliers(point: Point) -> int:
    """Count samples whose distance from the median exceeds both 5 standard deviations (estimated from the median absolute deviation) and 20 %."""
    deviations = [abs(sample_s - point.seconds) for sample_s in point.samples_s]
    if not deviations:
        return 0
    far = max(_OUTLIER_MADS * 1.4826 * statistics.median(deviations), _OUTLIER_SHARE * point.seconds)
    return sum(deviation > far for deviation in deviations)


def _cost(cell: Cell) -> int:
    if isinstance(cell, DecodeCell):
        return cell.batch * cell.context
    return cell.prompts * (cell.new_tokens + cell.cached_tokens)
