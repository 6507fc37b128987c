"""The running requests of the jump engine; advancing many decode steps costs as much as one.

A tick is a decode step. A decoding sequence stores its tokens at the tick when it joined: each tick adds one token to
all.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Self

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.types.requests import Request
from penstock.core.wire import HashArray, num_tokens, unpack_hashes
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.tiers import TieredPool
from penstock.sim.workload.prompt import Stream


@dataclass(slots=True, eq=False)
class SimSequence:
    """One request.

    stream:    names its blocks beyond those in the request
    hashes:    (n, 2) uint64, names of its leading blocks, computed on demand
    known:     its tokens; while decoding, its tokens at tick `joined`
    computed:  prompt tokens with KV, during prefill
    published: number of its leading blocks in the prefix cache
    parent:    low64 of the last published block, None without any
    num_sent:  output tokens sent in deltas
    since_tokens, rank: as in `engine.scheduling.sequences.Sequence`
    """

    request: Request
    stream: Stream
    hashes: HashArray
    arrival: int
    known: int
    num_prompt: int
    end_tokens: int
    computed: int = 0
    joined: int | None = None
    blocks: list[BlockId] = field(default_factory=list)
    published: int = 0
    parent: int | None = None
    num_sent: int = 0
    cached_tokens: int | None = None
    is_fresh: bool = True
    is_aborted: bool = False
    since_tokens: int = 0
    rank: float | None = None

    @classmethod
    def of(
        cls, request: Request, stream: Stream, context_length: int, *, block_size: int, arrival: int
    ) -> Self:
        """Create it from a request; blocks that reach into the output are named by the stream."""
        known = num_tokens(request.token_ids)
        num_prompt = known - request.num_emitted
        return cls(
            request=request,
            stream=stream,
            hashes=unpack_hashes(request.block_hashes).reshape(-1, 2)[: num_prompt // block_size],
            arrival=arrival,
            known=known,
            num_prompt=num_prompt,
            end_tokens=min(num_prompt + request.sampling.max_tokens, context_length),
            num_sent=request.num_emitted,
        )

    @property
    def end_tick(self) -> int:
        """Tick at which it has all its tokens."""
        assert self.joined is not None, "decodes"
        return self.joined + self.end_tokens - self.known

    def name_blocks(self, count: int, block_size: int) -> HashArray:
        """Give the names of its first `count` blocks, (count, 2) uint64."""
        have = len(self.hashes)
        if count > have:
            more = self.stream.block_hashes(block_size, have, count)
            self.hashes = np.concatenate((self.hashes, more)) if have else more
        return self.hashes[:count]

    def names_between(self, start: int, end: int, block_size: int) -> HashArray:
        """Give the names of its blocks `start` to `end`, (end - start, 2) uint64; does not extend `hashes`."""
        if start >= len(self.hashes):
            return self.stream.block_hashes(block_size, start, end)
        return self.name_blocks(end, block_size)[start:]


def give_blocks(pool: BlockPool | TieredPool, lacking: Sequence[tuple[SimSequence, int]]) -> None:
    """Allocate (sequence, count) blocks; the pool has enough."""
    total = sum([blocks for _, blocks in lacking])
    if not total:
        return
    taken = pool.allocate(total)
    assert taken is not None, "counted before"
    if len(lacking) == 1:
        lacking[0][0].blocks += taken
        return
    start = 0
    for sequence, blocks in lacking:
        sequence.blocks += taken[start : start + blocks]
        start += blocks


class Batch:
    """Sequences in prefill and in decode. One engine owns it."""

    def __init__(self, block_size: int) -> None:
        self.running: list[SimSequence] = []
        """Oldest arrival first."""
        self.prefilling: list[SimSequence] = []
        """Running sequences in prefill, oldest arrival first."""
        self.onboarding: list[SimSequence] = []
        """Running sequences that wait for blocks of lower tiers."""
        self.tick = 0
        self.num_decoding = 0
        self._size = block_size
        self._context = 0  # sum over decoding sequences of known - joined
        # decoding sequences, sorted: (tick modulo block size at which it starts a block, arrival, sequence)
        self._phases: list[tuple[int, int, SimSequence]] = []
        # heap of (end tick, arrival, number, sequence); stale entries are dropped lazily
        self._ends: list[tuple[int, int, int, SimSequence]] = []
        self._numbers = count()

    def context_tokens(self, tick: int) -> int:
        """Sum the tokens of all decoding sequences at a tick."""
        return self._context + self.num_decoding * tick

    def blocks_due(self, first_tick: int, steps: int) -> int:
        """Count the new blocks that decoding sequences need for `steps` steps from `first_tick` on."""
        rounds, rest = divmod(steps, self._size)
        blocks = rounds * self.num_decoding
        for start, end in self._spans(first_tick % self._size, rest):
            blocks += end - start
        return blocks

    def beginning(self, first_tick: int, steps: int = 1) -> list[tuple[SimSequence, int]]:
        """List (sequence, new blocks) for the steps from `first_tick` on."""
        if not self._phases:
            return []
        rounds, rest = divmod(steps, self._size)
        spans = self._spans(first_tick % self._size, rest)
        if not rounds:
            return [(entry[2], 1) for start, end in spans for entry in self._phases[start:end]]
        more = {index for start, end in spans for index in range(start, end)}
        return [(entry[2], rounds + (index in more)) for index, entry in enumerate(self._phases)]

    def admit(self, sequence: SimSequence) -> None:
        """Add a sequence for prefill."""
        insort(self.running, sequence, key=_arrival)
        insort(self.prefilling, sequence, key=_arrival)

    def admit_to_onboard(self, sequence: SimSequence) -> None:
        """Add a sequence that waits for blocks of lower tiers."""
        insort(self.running, sequence, key=_arrival)
        self.onboarding.append(sequence)

    def has_arrived(self, sequence: SimSequence) -> None:
        """Move a sequence from onboarding to prefill."""
        self.onboarding.remove(sequence)
        insort(self.prefilling, sequence, key=_arrival)

    def join(self, sequence: SimSequence) -> None:
        """Move a sequence from prefill to decode, with its first token."""
        self.prefilling.remove(sequence)
        sequence.known += 1
        sequence.joined = self.tick
        self._context += sequence.known - self.tick
        insort(self._phases, (self._begins_at(sequence), sequence.arrival, sequence))
        self.num_decoding += 1
        heapq.heappush(self._ends, (sequence.end_tick, sequence.arrival, next(self._numbers), sequence))

    def leave(self, sequence: SimSequence) -> None:
        """Remove a sequence; sets `known`, and for a decoding one `computed` = known - 1."""
        self.running.remove(sequence)
        if sequence.joined is None:
            (self.onboarding if sequence in self.onboarding else self.prefilling).remove(sequence)
            return
        del self._phases[bisect_left(self._phases, (self._begins_at(sequence), sequence.arrival))]
        self.num_decoding -= 1
        self._context -= sequence.known - sequence.joined
        sequence.known += self.tick - sequence.joined
        sequence.computed = sequence.known - 1
        sequence.joined = None

    def next_end(self) -> int:
        """Give the earliest end tick; at least one sequence must decode."""
        while not _is_end(*self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def ended(self) -> SimSequence | None:
        """Give one finished sequence, which the caller removes before the next call; None without any."""
        while self._ends and self._ends[0][0] <= self.tick:
            end = heapq.heappop(self._ends)
            if _is_end(*end):
                return end[-1]
        return None

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        decoding = [s for s in self.running if s.joined is not None]
        phases = sorted((self._begins_at(s), s.arrival) for s in decoding)
        assert self.num_decoding == len(phases), f"{self.num_decoding} are said to decode, {len(phases)} do"
        assert phases == [(phase, arrival) for phase, arrival, _ in self._phases], (
            "phases: of all that decode"
        )
        assert self._context == sum(s.known - (s.joined or 0) for s in decoding), "context: summed up"
        others = sorted(self.prefilling + self.onboarding, key=_arrival)
        assert [s for s in self.running if s.joined is None] == others, (
            "prefilling and onboarding: the others"
        )
        arrivals = [s.arrival for s in self.running]
        assert arrivals == sorted(arrivals), "running: oldest first"
        assert {s for *_, s in self._ends} >= {s for s in decoding if not s.is_aborted}, "ends: of all"

    def _spans(self, phase: int, length: int) -> list[tuple[int, int]]:
        """Find sequences that start a block within `length` ticks of a phase, as index spans."""
        if not length:
            return []
        phases, end = self._phases, phase + length
        start = bisect_left(phases, (phase,))
        if end <= self._size:
            return [(start, bisect_left(phases, (end,), start))]
        return [(start, len(phases)), (0, bisect_left(phases, (end - self._size,)))]

    def _begins_at(self, sequence: SimSequence) -> int:
        """Give the ticks, modulo the block size, at which it starts a block."""
        assert sequence.joined is not None, "decodes"
        return (1 - sequence.known + sequence.joined) % self._size


def _arrival(sequence: SimSequence) -> int:
    return sequence.arrival


def _is_end(tick: int, _arrival: int, _number: int, sequence: SimSequence) -> bool:
    """Tell whether a heap entry is current: its sequence may have left or joined again."""
    return sequence.joined is not None and not sequence.is_aborted and tick == sequence.end_tick
