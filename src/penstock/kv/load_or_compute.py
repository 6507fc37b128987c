"""Measured speeds, and what follows from them: whether KV is loaded or computed, and what bandwidth a tier needs."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.perf.latency import fit_non_negative
from penstock.seams.kv import KvTier

_WEIGHT = 0.2
"""Weight of the latest measurement in the mean; that of each older one shrinks by 1 - `_WEIGHT`."""


class MeasuredSpeed:
    """Seconds per unit of work: an exponentially weighted mean of measurements. Not thread-safe."""

    def __init__(self, *, half_life_s: float | None = None, clock: Callable[[], float] | None = None) -> None:
        """Begin without a measurement.

        Args:
            half_life_s: after so many seconds without a measurement the prediction is half, so that a tier that was slow once
                is tried again; None or infinite: predictions do not change.
            clock: returns seconds; None is the event loop's.
        """
        self._units = self._seconds = 0.0
        self._half_life_s = half_life_s
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._measured_at_s = 0.0
        self._busy_until_s = -math.inf

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._units > 0

    @property
    def age_s(self) -> float:
        """Seconds since the last measurement; infinite before the first. For speeds with a half-life."""
        return self._clock() - self._measured_at_s if self._units else math.inf

    def measure(self, units: float, seconds: float) -> None:
        """Add a measurement; one of more units weighs more."""
        if units > 0 and seconds >= 0:
            self._units = self._units * (1 - _WEIGHT) + units * _WEIGHT
            self._seconds = self._seconds * (1 - _WEIGHT) + seconds * _WEIGHT
            if self._half_life_s is not None:
                self._measured_at_s = self._clock()

    def measure_overlapping(self, units: float, begun_s: float, ended_s: float) -> None:
        """Add work that other work may have overlapped: it took the time since that ended, where this is later than its own begin.

        So what all of it took together counts once. To be called when each of them ends.
        """
        self.measure(units, max(ended_s - max(begun_s, self._busy_until_s), 0.0))
        self._busy_until_s = max(self._busy_until_s, ended_s)

    def seconds(self, units: float) -> float:
        """Predict the time of so many units; 0 before the first measurement."""
        if not self._units:
            return 0.0
        predicted_s = units * self._seconds / self._units
        if self._half_life_s is None:
            return predicted_s
        age_s = self._clock() - self._measured_at_s
        return float(predicted_s * 0.5 ** (age_s / self._half_life_s))


_RIDGE = (0.0025, 0.0025, 0.0025, 0.0)
"""What no step tells apart is charged to the prompt tokens, as where every step has the same prompt and decode rows."""
_STEPS_HALF, _WEIGHT_MIN = 16, 0.001
"""Steps of its kind after which a size weighs half, and the least that it weighs: one slow step long ago, as the first prompt's, says
little against those of now, but a quick one still shows that a price is too high."""
_REFIT_SHARE, _REFIT_STEPS = 8, 16
"""Prices are fitted again after an eighth more steps, at most 16."""


class MeasuredPrefill:
    """Seconds that each prompt token adds to a step, fitted to the steps of an engine. Not thread-safe.

    A step takes a base, and a time for each decode row, for each token of these rows' context, and for each prompt token. Steps of
    about one size are kept as one mean, so that the price of steps that have become rare stays known.
    """

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, int], tuple[float, ...]] = {}
        """By binary orders of prompt tokens and decode rows: decode rows, their context, prompt tokens, seconds; means."""
        self._seen_at: dict[tuple[int, int], int] = {}
        """The last step of each size, as `_steps` counts them."""
        self._steps = [0, 0]
        """Steps without a prompt, and with one."""
        self._unfitted = 0
        self._token_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether prompt tokens were measured to take time."""
        return self.seconds(1) > 0

    def measure(
        self, prompt_tokens: int, seconds: float, *, decode_rows: int = 0, context_tokens: int = 0
    ) -> None:
        """Add a step.

        Args:
            prompt_tokens: that it computed.
            seconds: that it took.
            decode_rows: sequences of which it computed the next token, and tokens drafted after it.
            context_tokens: the sum of these sequences' lengths.
        """
        if seconds <= 0 or not (prompt_tokens or decode_rows):
            return
        size, kind = (prompt_tokens.bit_length(), decode_rows.bit_length()), int(prompt_tokens > 0)
        step = (decode_rows, context_tokens, prompt_tokens, seconds)
        known = self._by_size.get(size, step)
        self._by_size[size] = tuple(old + _WEIGHT * (new - old) for old, new in zip(known, step, strict=True))
        self._steps[kind] += 1
        self._seen_at[size] = self._steps[kind]
        self._unfitted += 1

    def seconds(self, prompt_tokens: float) -> float:
        """Predict the time that so many prompt tokens add to steps; 0 before the first measurement."""
        if self._unfitted * _REFIT_SHARE >= min(sum(self._steps), _REFIT_SHARE * _REFIT_STEPS) > 0:
            self._unfitted = 0
            self._token_s = self._fit()
        return prompt_tokens * self._token_s

    def _fit(self) -> float:
        """Give the seconds of a prompt token."""
        rows, seconds, weights = [], [], []
        for size, (*terms, step_s) in self._by_size.items():
            age = self._steps[size[0] > 0] - self._seen_at[size]
            rows.append((1.0, *terms))
            seconds.append(step_s)
            weights.append(max(_WEIGHT_MIN, 0.5 ** (age / _STEPS_HALF)))
        return fit_non_negative(rows, seconds, weights=weights, ridge=_RIDGE)[3]


LOAD_HALF_LIFE_S = 30.0
"""Half-life of tiers' predictions: a tier whose loads were slow is tried again after some minutes."""


ComputeSeconds = Callable[[int, int], float | None]
"""Predicts the seconds to compute so many tokens after so many cached ones; None before anything was measured."""
_Source = TypeVar("_Source")
_LATE_FACTOR = 4.0
_LATE_MARGIN_S = 0.25


def worth_loading(
    runs: Sequence[tuple[_Source, int, int]],
    load_s: Callable[[_Source, int], float],
    compute_s: ComputeSeconds,
    *,
    known_tokens: int,
    cached_tokens: int,
    wait_s: float = 0.0,
) -> int:
    """Return how many leading runs to load for the earliest end; all of them before a prompt was ever computed.

    Sources load at the same time, and each of them its runs one after another.

    Args:
        runs: source, number of blocks, and tokens that need not be computed, of consecutive runs of a prefix.
        load_s: predicts the seconds until a source has loaded so many blocks.
        compute_s: how long the engine computes.
        known_tokens: all tokens of the request.
        cached_tokens: tokens before the first run.
        wait_s: seconds until the engine would begin to compute; what is loaded by then costs nothing.
    """
    best, best_s = 0, compute_s(known_tokens - cached_tokens, cached_tokens)
    num_blocks: Counter[_Source] = Counter()
    slowest_s = 0.0
    for count, (source, blocks, tokens) in enumerate(runs, 1):
        num_blocks[source] += blocks
        slowest_s = max(slowest_s, load_s(source, num_blocks[source]) - wait_s)
        cached_tokens += tokens
        rest_s = compute_s(known_tokens - cached_tokens, cached_tokens)
        if best_s is None or rest_s is None:
            return len(runs)
        if slowest_s + rest_s < best_s:
            best, best_s = count, slowest_s + rest_s
    return best


def late_after_s(load_s: float) -> float:
    """Return the seconds after which a load that was predicted to take `load_s` is given up."""
    return _LATE_MARGIN_S + _LATE_FACTOR * load_s


_TOKENS_MIN = 256
"""Prompt tokens to be computed before their speed counts as known."""
_LOOK_S = 5.0
_SAMPLE_BLOCKS = 64
_GB = 1e9
_NEWS = 2.0
"""A break-even that is so many times what was said before is said again."""
_RECOVERED = 1.25
"""A tier that was too slow has to be so much faster than the break-even before it is warned of again."""


class BreakEven:
    """Compares tiers with computing: a tier helps while its bytes per second exceed KV bytes per token x prompt tokens per second.

    One line a tier at the start, by probes; another one if serving measures something else; and one warning when a tier's speed
    falls below. Computing a token takes longer after a long prefix, so a tier a little below the line still helps long prompts.
    One task owns it.
    """

    def __init__(
        self,
        tiers: Sequence[KvTier],
        prefill: MeasuredPrefill,
        block_size: int,
        on_price: Callable[[float, float], None] = lambda *_: None,
    ) -> None:
        """Compare nothing yet.

        Args:
            tiers: of one engine.
            prefill: seconds per prompt token, measured.
            block_size: tokens in a block.
            on_price: called at each look with the measured seconds to compute a token, and to load one from the nearest tier
                that is not off; infinite before its first load.
        """
        self._on_price = on_price
        self._tiers = tiers
        self._prefill = prefill
        self._block_size = block_size
        self._tokens = 0
        self._said: dict[Tier, tuple[float, float | None]] = {}
        """By tier, what was said last: bytes per second that it needs, and that it has."""
        self._slow: set[Tier] = set()
        self._look_at_s = 0.0

    def probed(self, token_s: float, speeds: Sequence[float | None]) -> tuple[str, ...]:
        """Log what probes at the start have measured, and say it in a line for each tier.

        Args:
            token_s: seconds to compute a prompt token.
            speeds: bytes per second that each tier loads; None where that is not known.
        """
        lines = []
        for tier, speed in zip(self._tiers, speeds, strict=True):
            self._say(tier, token_s, speed, "probe")
            needed = tier.block_bytes / self._block_size / token_s
            measured = "not measured yet" if speed is None else f"a probe measured {_rate(speed)}"
            verdict = "" if speed is None or speed >= needed else ", so it cannot help"
            lines.append(f"{tier.tier.value}: loading pays above {_rate(needed)}; {measured}{verdict}")
        return tuple(lines)

    def computed(self, num_tokens: int) -> None:
        """Note that so many prompt tokens were computed; looks at the tiers every few seconds."""
        self._tokens += num_tokens
        now_s = asyncio.get_running_loop().time()
        if self._tokens >= _TOKENS_MIN and now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self.look()

    def look(self) -> None:
        """Compare all tiers now."""
        token_s = self._prefill.seconds(1)
        if not token_s:
            return
        self._on_price(token_s, self._load_s())
        for tier in self._tiers:
            load_s = tier.load_s(_SAMPLE_BLOCKS)
            speed = _SAMPLE_BLOCKS * tier.block_bytes / load_s if load_s else None
            self._say(tier, token_s, speed, "serving")

    def _say(self, tier: KvTier, token_s: float, speed: float | None, measured_by: str) -> None:
        """Say what a tier needs and has, if that is news; warn if it is too slow."""
        needed = tier.block_bytes / self._block_size / token_s
        known_needed, known_speed = self._said.get(tier.tier, (0.0, None))
        is_first_speed = speed is not None and known_speed is None
        if is_first_speed or not 1 / _NEWS < needed / max(known_needed, 1e-9) < _NEWS:
            self._said[tier.tier] = needed, known_speed if speed is None else speed
            get_logger().info(
                "kv_tier_break_even",
                tier=tier.tier.value,
                needed_bytes_per_s=round(needed),
                measured_bytes_per_s="not yet" if speed is None else round(speed),
                kv_bytes_per_token=round(tier.block_bytes / self._block_size),
                prompt_tokens_per_s=round(1 / token_s),
                measured_by=measured_by,
            )
        if speed is not None:
            self._warn(tier.tier, speed, needed)

    def _load_s(self) -> float:
        """Give the seconds to load a token, besides the loads under way."""
        for tier in self._tiers:
            if not tier.is_off:
                seconds = tier.load_s(2 * _SAMPLE_BLOCKS) - tier.load_s(_SAMPLE_BLOCKS)
                return seconds / _SAMPLE_BLOCKS / self._block_size or math.inf
        return math.inf

    def _warn(self, tier: Tier, measured: float, needed: float) -> None:
        if measured >= _RECOVERED * needed:
            self._slow.discard(tier)
        elif measured < needed and tier not in self._slow:
            self._slow.add(tier)
            get_logger().warning(
                "kv_tier_too_slow",
                tier=tier.value,
                measured_bytes_per_s=round(measured),
                needed_bytes_per_s=round(needed),
                effect="computing is quicker than loading, so its blocks are computed; it costs writes and brings little",
            )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _GB:.2g} GB/s" if bytes_per_s >= _GB else f"{bytes_per_s / 1e6:.2g} MB/s"
