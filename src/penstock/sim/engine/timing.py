"""A runner that computes nothing and takes the time of a latency model.

The real scheduler and pool run on it token by token: slow and exact. Each sampled token depends on all tokens before it,
so that a lost or repeated token changes all later ones.
"""

import asyncio
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.descriptors import MemoryKind, Region
from penstock.core.types.kv import KvLayout, RankLayout
from penstock.core.wire import TokenArray
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan
from penstock.perf.latency import LatencyModel

VOCAB_SIZE = 1 << 16


class Pace:
    """Speed of a host, changed by faults."""

    def __init__(self) -> None:
        self._factor = 1.0
        self.is_going = True
        """Whether the host runs; changed by `stop` and `go_on`."""
        self.failing_steps = 0
        """Number of next steps that fail, for exact engines."""
        self._going = asyncio.Event()
        self._going.set()
        self._watchers: list[Callable[[], None]] = []

    @property
    def factor(self) -> float:
        """Slowdown factor of steps that start now."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._factor = factor
        self._tell()

    def stop(self) -> None:
        self.is_going = False
        self._going.clear()
        self._tell()

    def go_on(self) -> None:
        self.is_going = True
        self._going.set()
        self._tell()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after each change."""
        self._watchers.append(watcher)

    async def spend(self, seconds: float) -> None:
        """Sleep for a step of `seconds` at the host's speed."""
        await asyncio.sleep(seconds * self._factor)
        await self._going.wait()

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher()


def next_token(token_ids: TokenArray) -> int:
    """Compute the next token id from all tokens."""
    return zlib.crc32(token_ids.tobytes()) % VOCAB_SIZE


def reference(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Give the whole output of an undisturbed engine for a prompt."""
    tokens = np.zeros(len(prompt) + max_tokens, dtype="<i4")
    tokens[: len(prompt)] = prompt
    for end in range(len(prompt), len(tokens)):
        tokens[end] = next_token(tokens[:end])
    return [int(token) for token in tokens[len(prompt) :]]


def no_layout(block_bytes: int, block_size: int, num_blocks: int) -> KvLayout:
    """Make a layout with one range per block, for any number of devices: transfers are counted in total bytes."""
    return KvLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=block_bytes // block_size,
        dtype="simulated",
        element_bytes=1,
        block_size=block_size,
        ranks=(RankLayout(layers=(0,), heads=(0,), num_blocks=num_blocks),),
        planes=1,
    )


def no_memory(info: RunnerInfo) -> Sequence[Sequence[Region]]:
    """Make KV regions to register; they have no memory, and `SimTransport` moves no bytes."""
    if info.kv_layout is None:
        return ()
    return ((Region(MemoryKind.VRAM, info.num_blocks * info.kv_bytes_per_block),),)


class TimingRunner:
    """A `Runner` that sleeps."""

    def __init__(self, latency: LatencyModel, info: RunnerInfo, pace: Pace) -> None:
        """Create the runner.

        Args:
            latency: gives the time of each step.
            info: returned by `start`.
            pace: speed of the host.
        """
        self._latency = latency
        self._info = info
        self._pace = pace

    async def start(self) -> RunnerInfo:
        return self._info

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        await self._pace.spend(self._price_s(plan, table))
        if self._pace.failing_steps:
            self._pace.failing_steps -= 1
            raise RuntimeError("this step was to fail")
        token_ids = np.full(len(plan.slots), -1, dtype=np.int32)
        for row in np.flatnonzero(plan.samples).tolist():
            slot = plan.slots[row]
            token_ids[row] = next_token(table.token_ids[slot, : table.num_tokens[slot]])
        return Sampled(token_ids)

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return no_memory(self._info)

    async def close(self) -> None:
        """Do nothing."""

    def _price_s(self, plan: StepPlan, table: SequenceTable) -> float:
        decode, prefill = plan.slots[: plan.num_decode], plan.slots[plan.num_decode :]
        new, cached = plan.num_new[plan.num_decode :].tolist(), table.num_computed[prefill].tolist()
        context_tokens = int(table.num_tokens[decode].sum())
        return self._latency.mixed_step_s(
            list(zip(new, cached, strict=True)), plan.num_decode, context_tokens
        )
