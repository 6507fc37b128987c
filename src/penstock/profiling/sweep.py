"""Measures a plan's cells in rounds, so that a temporarily busy machine affects all cells equally."""

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from penstock.core.errors import ConfigError, PenstockError
from penstock.perf.profile.profile import DecodePoint, Point, PrefillPoint
from penstock.profiling.cells import Cell, DecodeCell, PrefillCell
from penstock.profiling.plan import CELLS_MIN, Plan, SweepConfig
from penstock.profiling.targets.target import Target

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
    target: Target, plan: Plan, config: SweepConfig, on_progress: OnProgress | None = None
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


async def _sample(target: Target, cell: Cell) -> Point:
    try:
        if isinstance(cell, PrefillCell):
            return await target.prefill(cell)
        return await target.decode(cell)
    except PenstockError as error:
        raise type(error)(f"{cell}: {error.message}") from error


def _gather(samples: dict[Cell, list[Point]], plan: Plan, config: SweepConfig) -> Measured:
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
