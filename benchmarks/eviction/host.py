"""Requests through a device and a host tier below it, one after another: the prefill seconds that both caches save.

The device evicts by `seconds`, and knows what a load takes. The tier gets every block of a request that has ended, and
uses a block when it is stored and at each load, as `HostTier` does. A load delays the prompt.
"""

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.eviction.replay import Prompts, serve
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.eviction import BlockUse, EvictionPolicy
from penstock.kv.load_or_compute import worth_loading
from penstock.kv.pool import BlockPool, commit_runs, split_prefix
from penstock.perf.roofline import Roofline
from penstock.sim.engine_timing import LowerTier, prefill_price
from penstock.sim.trace import PREFIX_BLOCK_TOKENS

_USE = BlockUse()


class Sizes(NamedTuple):
    """Blocks of a device and of the host tier below it; 0: none."""

    device: int
    host: int


def host_saved(prompts: Prompts, sizes: Sizes, policy: EvictionPolicy, model: Roofline) -> float:
    """Give the share of prefill seconds saved, in percent, loads subtracted, with a host tier of a policy."""
    lower = [LowerTier(Tier.HOST, sizes.host)] if sizes.host else []
    device = BlockPool(sizes.device, PREFIX_BLOCK_TOKENS, "seconds", price=prefill_price(model, lower))
    host = BlockPool(sizes.host, PREFIX_BLOCK_TOKENS, policy, Tier.HOST) if sizes.host else None
    block_bytes = PREFIX_BLOCK_TOKENS * model.kv_bytes_per_token

    def load_s(_tier: Tier, blocks: int) -> float:
        return model.onboard_s(blocks * block_bytes, Tier.HOST)

    left_s = 0.0
    for row, names in zip(prompts.rows, prompts.names, strict=True):
        # the last token of a prompt is always computed
        most = min(len(names), (row.input_tokens - 1) // PREFIX_BLOCK_TOKENS)
        held = device.match(names)
        begin = min(len(held), most)
        cached = begin * PREFIX_BLOCK_TOKENS
        found = host.match(names[begin:most]) if host is not None else []
        if found and worth_loading(
            [(Tier.HOST, len(found), len(found) * PREFIX_BLOCK_TOKENS)],
            load_s,
            prompts.prefill_s,
            known_tokens=row.input_tokens,
            cached_tokens=cached,
        ):
            assert host is not None
            host.acquire(found)
            host.release(found, _USE)
            left_s += load_s(Tier.HOST, len(found))
            cached += len(found) * PREFIX_BLOCK_TOKENS
        left_s += prompts.prefill_s(row.input_tokens - cached, cached)
        if serve(device, names, held) and host is not None:
            _store(host, names)
    return 100 * (1 - left_s / sum(prompts.alone_s))


def _store(host: BlockPool, names: HashArray) -> None:
    """Keep the blocks of a prefix that the tier lacks."""
    held, missing = split_prefix(host, names)
    host.acquire(held)  # not evicted for their own children
    missing = missing[: host.num_available]
    taken = host.allocate(len(missing)) if missing else None
    host.release(held)
    if taken:
        commit_runs(host, names, missing, taken)
        host.release(taken, _USE)
    host.take_events()


def read_sizes(texts: Iterable[str]) -> list[Sizes]:
    """Read `DEVICE:HOST` of each.

    Raises:
        ValueError: it is something else, or less than two blocks of either.
    """
    found = []
    for text in texts:
        device, _, host = text.partition(":")
        if not (device.isdecimal() and host.isdecimal() and int(device) >= 2 and int(host) >= 2):
            raise ValueError(f"expected DEVICE:HOST, blocks >= 2 of each, got {text!r}")
        found.append(Sizes(int(device), int(host)))
    return found
