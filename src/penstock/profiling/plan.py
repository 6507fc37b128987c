"""Chooses the cells of a sweep and the held-out points."""

import math
import random
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.profiling.cells import Cell, DecodeCell, Limits, PrefillCell

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
class Plan:
    """`fitted` and `held_out` are disjoint; `left_out` are cells that cannot be measured, with the reason."""

    fitted: tuple[Cell, ...]
    held_out: tuple[Cell, ...]
    left_out: tuple[str, ...]


def plan_sweep(config: SweepConfig, limits: Limits) -> Plan:
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
    return Plan(tuple(fitted), tuple(_draw_held_out(config, limits, fitted)), tuple(left_out))


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
