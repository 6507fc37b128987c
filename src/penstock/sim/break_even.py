"""What bandwidth a KV tier needs to be worth its loads, by the prices of a simulated deployment."""

from collections.abc import Iterable, Iterator

from penstock.sim.role_group import RoleGroup

_TOKENS = 8192
_BYTES = 1 << 30


def say_break_even(groups: Iterable[RoleGroup]) -> Iterator[str]:
    """Say of each tier of each role what bandwidth pays, and what it has in simulation."""
    for group in groups:
        latency = group.latency
        tokens_per_s = _TOKENS / latency.prefill_s(_TOKENS, 0)
        needed = latency.kv_bytes_per_token * tokens_per_s
        for kind in group.lower_tiers:
            simulated = _BYTES / latency.onboard_s(_BYTES, kind.tier)
            verdict = "" if simulated > needed else ", so it helps only behind long prefixes, or not at all"
            yield (
                f"roles.{group.role}.kv.{kind.tier}: loading pays above {needed / 1e9:.2g} GB/s"
                f" ({latency.kv_bytes_per_token / 1e3:.3g} kB of KV a token x {tokens_per_s:,.0f} prompt tokens/s);"
                f" simulated at {simulated / 1e9:.2g} GB/s{verdict}"
            )
