"""How long a simulated engine's steps and loads from lower tiers take, and how fast its host runs."""

import asyncio
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.core.clock import LoopClock, Timer
from penstock.core.descriptors import MemoryKind, Region
from penstock.core.ids import BlockId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.kv import KvLayout, RankLayout
from penstock.core.wire import HashArray, TokenArray
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan
from penstock.kv.eviction import BlockUse, EvictionPolicy, PrefillPrice
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool, commit_runs, split_prefix
from penstock.perf.latency import LatencyModel
from penstock.seams.kv import KvTier

VOCAB_SIZE = 1 << 16


class HostPace:
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

    def __init__(self, latency: LatencyModel, info: RunnerInfo, pace: HostPace) -> None:
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


_USE = BlockUse()


class LowerTier(NamedTuple):
    """A tier below a device.

    Attributes:
        tier: where it is.
        num_blocks: how many it keeps.
        eviction: which block a full one evicts first; a block is used when it is stored and at each load.
    """

    tier: Tier
    num_blocks: int
    eviction: EvictionPolicy = "lru"


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    owner: "TimedTier"
    sources: list[BlockId]
    done: Callable[[int], None]
    timer: asyncio.TimerHandle | None = None

    def cancel(self, *, is_late: bool = False) -> None:  # noqa: ARG002 - none is late
        """End it now."""
        self.owner.end(self, arrived=0)


class TimedTier(KvTier):
    """Loads run one after another at the tier's full bandwidth, while steps run.

    Offloads take no time: they use the other direction of the link, which is rarely full (docs/decisions/0073).
    """

    num_corrupt = 0
    is_off = False
    shared = None

    def __init__(self, kind: LowerTier, latency: LatencyModel, *, block_size: int, pace: HostPace) -> None:
        """Make an empty tier.

        Args:
            kind: where it keeps how many blocks.
            latency: gives the time of a load.
            block_size: tokens in a block.
            pace: speed of the host.
        """
        self.tier = kind.tier
        self.num_blocks = kind.num_blocks
        self.pool = BlockPool(kind.num_blocks, block_size, kind.eviction, kind.tier)
        """Its index, for reports and checks."""
        self.block_bytes = round(latency.kv_bytes_per_token * block_size)
        self._block_bytes = latency.kv_bytes_per_token * block_size
        self._latency = latency
        self._pace = pace
        pace.watch(self._on_pace)
        self._loop = asyncio.get_running_loop()
        self._free_at_s = 0.0
        self._loads: set[_Load] = set()
        self._due: list[_Load] = []
        """Loads whose time is over while the host is stopped."""

    @property
    def num_cached(self) -> int:
        """Blocks that it keeps."""
        return self.pool.num_cached

    @property
    def chunk_blocks(self) -> int:
        """All blocks: nothing ends a load early, so that chunks would cost events alone."""
        return self.num_blocks

    @property
    def offload_room(self) -> int:
        """All blocks: offloads take no time."""
        return self.num_blocks

    def probe(self) -> float | None:
        """Return None: `load_s` is exact."""
        return None

    def start(self, on_change: Callable[[], None]) -> None:
        """Do nothing: it changes by loads and offloads alone."""

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that it keeps."""
        return len(self.pool.match(block_hashes))

    def load_s(self, num_blocks: int) -> float:
        """Give the seconds until so many blocks are loaded, behind the loads under way."""
        waiting_s = max(self._free_at_s - self._loop.time(), 0.0)
        return waiting_s + self._pace.factor * self._latency.onboard_s(
            num_blocks * self._block_bytes, self.tier
        )

    def load(self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]) -> _Load:
        """Begin to load leading blocks; all of them arrive."""
        sources = self.pool.match(block_hashes)[: len(targets)]
        self._free_at_s = self._loop.time() + self.load_s(len(sources))
        self.pool.acquire(sources)
        load = _Load(self, sources, done)
        self._loads.add(load)
        load.timer = self._loop.call_at(self._free_at_s, self._on_time, load)
        return load

    def offload(
        self,
        block_hashes: HashArray,
        block_ids: Sequence[BlockId],  # noqa: ARG002 - there are no bytes to copy
        done: Callable[[Sequence[BlockId]], None],  # noqa: ARG002 - it reads none
    ) -> Sequence[BlockId]:
        """Keep the missing blocks of a prefix at once."""
        held, missing = split_prefix(self.pool, block_hashes)
        self.pool.acquire(held)
        missing = missing[: self.pool.num_available]
        taken = self.pool.allocate(len(missing)) if missing else None
        self.pool.release(held)  # as the newest, and not evicted for their own children
        if taken:
            commit_runs(self.pool, block_hashes, missing, taken)
            self.pool.release(taken, _USE)
        return ()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order."""
        return self.pool.take_events()

    def clear(self) -> None:
        """Forget all blocks."""
        self.pool.reset()

    async def close(self) -> None:
        """End all loads."""
        for load in tuple(self._loads):
            self.end(load, arrived=0)

    def end(self, load: _Load, *, arrived: int) -> None:
        """End a load, unless it has ended; the link stays busy until the time that it would have taken."""
        if load not in self._loads:
            return
        self._loads.discard(load)
        if load.timer is not None:
            load.timer.cancel()
        self.pool.release(load.sources, _USE)
        load.done(arrived)

    def _on_time(self, load: _Load) -> None:
        if self._pace.is_going:
            self.end(load, arrived=len(load.sources))
        else:
            self._due.append(load)

    def _on_pace(self) -> None:
        if self._pace.is_going:
            due, self._due = self._due, []
            for load in due:
                self.end(load, arrived=len(load.sources))


class _NeverLate(LoopClock):
    """The loop's clock without timers."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:  # noqa: ARG002
        return self

    def cancel(self) -> None:
        """Do nothing."""


def timed_kv_manager(
    pool: BlockPool,
    lower_tiers: Sequence[LowerTier],
    latency: LatencyModel,
    pace: HostPace,
    on_change: Callable[[], None],
) -> KvManager | None:
    """Make the KV manager of a simulated engine; None without lower tiers.

    Its loads are never late: they take the predicted time, or longer while the host is stopped. Each is told as a whole, which is
    all that the native scheduler knows.

    Args:
        pool: the device's blocks.
        lower_tiers: the tiers below, nearest first.
        latency: gives the time of loads and of computing.
        pace: speed of the host.
        on_change: called when a prefix has arrived, or blocks were freed.
    """
    if not lower_tiers:
        return None
    tiers = [TimedTier(kind, latency, block_size=pool.block_size, pace=pace) for kind in lower_tiers]
    return KvManager(
        pool,
        tiers,
        on_change,
        compute_s=lambda new, cached: pace.factor * latency.prefill_s(new, cached),
        clock=_NeverLate(),
        by_chunk=False,
    )


_EXACT = 1e-7  # relative distance of inner points from a line, below which a piece is linear
_INNER = (0.5, 0.29, 0.83)
_PRICED_TOKENS = 4096
_PRICED_DEPTH = 16_384
"""Tokens of the prefills that prices of eviction come from: as a chunk, and as a long prompt."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A step with up to `end` context tokens takes `base_s + slope_s * context`."""

    end: int
    base_s: float
    slope_s: float


def prefill_price(latency: LatencyModel, lower_tiers: Sequence[LowerTier] = ()) -> PrefillPrice:
    """Say what lost KV costs, for eviction.

    Args:
        latency: of the engine.
        lower_tiers: below the device, nearest first: the nearest keeps what is evicted.
    """
    first_s = latency.prefill_s(_PRICED_TOKENS)
    deep_s = latency.prefill_s(_PRICED_TOKENS, _PRICED_DEPTH)
    load_s = math.inf
    if lower_tiers:
        load_s = latency.onboard_s(_PRICED_TOKENS * latency.kv_bytes_per_token, lower_tiers[0].tier)
    return PrefillPrice(
        token_s=first_s / _PRICED_TOKENS,
        deeper_s=max(0.0, deep_s - first_s) / _PRICED_TOKENS / _PRICED_DEPTH,
        load_s=load_s / _PRICED_TOKENS,
    )


class DecodePrices:
    """Sums of `LatencyModel.decode_step_s`; caches the pieces of each batch size."""

    def __init__(self, latency: LatencyModel, context_length: int) -> None:
        self._latency = latency
        self._context_length = context_length
        self._pieces: dict[int, list[_Piece]] = {}

    def total_s(self, batch: int, context_tokens: int, steps: int) -> float:
        """Give the seconds of `steps` steps of a batch, the first with `context_tokens`."""
        total_s = 0.0
        for piece in self._pieces_of(batch):
            if context_tokens > piece.end:
                continue
            count = min(steps, (piece.end - context_tokens) // batch + 1)
            first_s = piece.base_s + piece.slope_s * context_tokens
            total_s += count * first_s + piece.slope_s * batch * (count * (count - 1) / 2)
            steps -= count
            if not steps:
                break
            context_tokens += count * batch
        assert not steps, f"{steps} steps beyond the context length"
        return total_s

    def steps_until(self, batch: int, context_tokens: int, seconds: float, most: int) -> int:
        """Count the steps started within `seconds`: 1 to `most`."""
        total_s, done = 0.0, 0
        for piece in self._pieces_of(batch):
            if context_tokens > piece.end:
                continue
            count = min(most - done, (piece.end - context_tokens) // batch + 1)
            first_s, more_s = piece.base_s + piece.slope_s * context_tokens, piece.slope_s * batch
            piece_s = count * first_s + more_s * (count * (count - 1) / 2)
            if total_s + piece_s >= seconds:
                return max(done + _steps_within(first_s, more_s, seconds - total_s, count), 1)
            total_s += piece_s
            done += count
            if done == most:
                break
            context_tokens += count * batch
        return most

    def _pieces_of(self, batch: int) -> list[_Piece]:
        pieces = self._pieces.get(batch)
        if pieces is None:
            pieces = self._pieces[batch] = []
            end = batch * self._context_length
            self._find(pieces, batch, (batch, end), (self._price_s(batch, batch), self._price_s(batch, end)))
        return pieces

    def _find(
        self, pieces: list[_Piece], batch: int, span: tuple[int, int], prices_s: tuple[float, float]
    ) -> None:
        """Add the pieces of a span, halving it until each half is linear."""
        (start, end), (first_s, last_s) = span, prices_s
        slope_s = (last_s - first_s) / (end - start) if end > start else 0.0
        inner = [start + int(part * (end - start)) for part in _INNER]
        if end - start <= batch or all(
            abs(self._price_s(batch, at) - first_s - slope_s * (at - start)) <= _EXACT * first_s
            for at in inner
        ):
            pieces.append(_Piece(end, first_s - slope_s * start, slope_s))
            return
        middle = inner[0]
        middle_s = self._price_s(batch, middle)
        self._find(pieces, batch, (start, middle), (first_s, middle_s))
        self._find(pieces, batch, (middle, end), (middle_s, last_s))

    def _price_s(self, batch: int, context_tokens: int) -> float:
        return self._latency.decode_step_s(batch, context_tokens)


def _steps_within(first_s: float, more_s: float, seconds: float, most: int) -> int:
    """Count the steps until `seconds`, where the first takes `first_s` and each next one `more_s` longer; `most` suffice."""
    half_s = more_s / 2
    linear_s = first_s - half_s
    root_s = math.sqrt(max(linear_s * linear_s + 4 * half_s * seconds, 0.0))
    steps = max(min(math.ceil(2 * seconds / (linear_s + root_s)), most), 1)
    while steps > 1 and (steps - 1) * first_s + more_s * ((steps - 1) * (steps - 2) / 2) >= seconds:
        steps -= 1
    while steps < most and steps * first_s + more_s * (steps * (steps - 1) / 2) < seconds:
        steps += 1
    return steps
