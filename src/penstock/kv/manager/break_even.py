"""Compares loading with computing by measured speeds: says what bandwidth a tier needs, and what lost KV costs."""

import asyncio
import math
from collections.abc import Callable, Sequence

from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.kv.measured import MeasuredPrefill
from penstock.seams.kv import KvTier

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
