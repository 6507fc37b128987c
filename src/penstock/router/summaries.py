"""Summaries of the prefixes that this region holds, for routers of other regions: by model, while a link asks for them."""

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.hashing import root_hash
from penstock.core.types.instances import request_salt
from penstock.core.types.kv import PrefixSummary, blocks_per_chunk, chunk_hashes, pack_root
from penstock.core.types.requests import Request
from penstock.core.wire import HashArray, PackedHashes, pack_hashes, unpack_hashes
from penstock.router.config import PrefixSummaryConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.radix import RadixTree

_HASH_BYTES = 8
_TURN_S = 0.2
"""Links of several regions ask at their own times; the advertised chunks change at most so often."""
_NOTED_MAX = 512
"""Prompts of one turn that count, the latest."""
_NOTED_CHUNKS_MAX = 32_768
"""Chunks of one turn that count: 5 ms on a shared AMD EPYC."""
_WAITING_MAX, _LOOKED_AT_MAX = 4096, 256
"""Prompts that wait until a worker has computed them, and how many are looked up in the index in one turn."""
_LOOKS_MAX = 40
"""Times that one is looked up; by then its prompt was computed, or went elsewhere."""
_CHECKED_MAX = 1024
"""Advertised chunks that are looked up in one turn, 2 ms with 1,000 workers: all 65,536 within a quarter of a minute."""
_HALF_LIFE_S = 120.0
"""A prompt counts half after so long."""
_EXPONENT_MAX = 64.0
_HEAT_FACTOR = 4
"""Counts that are kept, over the chunks that are advertised; half of them leave at once, the lowest first."""
_ADDED_SHARE = 0.75
"""Share of the byte rate for new changes; a link that begins anew catches up with the rest."""
_COLD_SHARE = 0.25
"""Of the chunks checked in a turn, how many leave while there is no room for others: the coldest."""
_LOG_FACTOR = 4


class SummaryChanges(NamedTuple):
    """Changes after version `since` up to `version`; with `since` 0 all that holds."""

    since: int
    version: int
    added: PackedHashes
    removed: PackedHashes


class HotPrefixes:
    """Keeps the advertised chunks and a log of their changes. One event loop owns it.

    Prompts raise the heat of their chunks. The hottest that a ready worker holds are advertised, parents before children, as many
    as the byte rate allows. Chunks that no worker holds any more are withdrawn at once, and their bytes count, too.

    Source: forward decay of counts as in Cormode et al., "Forward decay", 2009.
    """

    def __init__(self, tree: RadixTree, block_size: int, config: PrefixSummaryConfig, now_s: float) -> None:
        """Advertise nothing yet.

        Args:
            tree: the index of workers of this region.
            block_size: tokens of its blocks.
            config: bounds.
            now_s: the event loop's time.
        """
        self._tree = tree
        self._block_size = block_size
        self._config = config
        self._noted: deque[HashArray] = deque(maxlen=_NOTED_MAX)
        self._heat: dict[int, float] = {}  # of `_advertised` and of others
        self._heat_since_s = now_s
        self._waiting: deque[tuple[HashArray, int]] = deque(maxlen=_WAITING_MAX)
        """Chunks of prompts that are not advertised whole, and how often each was looked up."""
        self._advertised: dict[int, int] = {}  # version that added it
        self._gone: dict[int, int] = {}  # the version that takes it back
        self._log: list[int] = []  # chunk of each version from `_first` on; only its latest version counts
        self._first = 1
        self._unchecked: list[int] = []
        self._turned_s = now_s
        self._credit_bytes = 0.0

    def __len__(self) -> int:
        return len(self._advertised)

    @property
    def version(self) -> int:
        """Number of the latest change."""
        return self._first + len(self._log) - 1

    def note(self, hashes: HashArray) -> None:
        """Note a prompt that goes to a worker here.

        Args:
            hashes: (n,) uint64, of its full blocks.
        """
        chunks = chunk_hashes(hashes, self._block_size)
        if len(chunks):
            self._noted.append(chunks)

    def changes(self, after: int, bytes_max: int, ready: NDArray[np.bool_], now_s: float) -> SummaryChanges:
        """Give the oldest changes after a version, of `bytes_max` at most.

        Args:
            after: the last version that the asking side has; 0 for none.
            bytes_max: of hashes.
            ready: (num_slots,) bool, workers of this region whose blocks count.
            now_s: the event loop's time.
        """
        self._turn(ready, now_s)
        since = after if self._first - 1 <= after <= self.version else 0
        added, removed = [], []
        index, room = max(since - self._first + 1, 0), bytes_max // _HASH_BYTES
        while index < len(self._log) and room > 0:
            chunk, version = self._log[index], self._first + index
            if self._advertised.get(chunk) == version:
                added.append(chunk)
                room -= 1
            elif since and self._gone.get(chunk) == version:
                removed.append(chunk)
                room -= 1
            index += 1
        version = max(self._first + index - 1, since)
        return SummaryChanges(since, version, pack_hashes(added), pack_hashes(removed))

    def check(self) -> None:
        """Raise AssertionError where a bound or the log is wrong."""
        advertised, gone = self._advertised, self._gone
        assert len(advertised) <= self._config.chunks_max, f"{len(advertised)} chunks: past the bound"
        assert len(self._log) <= _LOG_FACTOR * self._config.chunks_max, f"{len(self._log)} changes are kept"
        assert advertised.keys().isdisjoint(gone), "a chunk is advertised or withdrawn"
        assert advertised.keys() <= self._heat.keys(), "heat: of all advertised chunks"
        assert len(self._heat) <= _HEAT_FACTOR * self._config.chunks_max, (
            f"{len(self._heat)} chunks are counted"
        )
        for chunk, version in (*advertised.items(), *gone.items()):
            assert self._log[version - self._first] == chunk, "the log has each one's latest version"

    # -- one turn

    def _turn(self, ready: NDArray[np.bool_], now_s: float) -> None:
        """Count the noted prompts, withdraw chunks that no worker holds, and advertise the hottest others."""
        passed_s = now_s - self._turned_s
        if passed_s < _TURN_S:
            return
        self._turned_s = now_s
        rate = _ADDED_SHARE * self._config.bytes_per_s
        self._credit_bytes = min(self._credit_bytes + passed_s * rate, rate)
        self._take_noted(now_s)
        self._check_advertised(ready)
        self._advertise(ready)
        self._trim()

    def _take_noted(self, now_s: float) -> None:
        weight, left = self._weight(now_s), _NOTED_CHUNKS_MAX
        heat = self._heat
        while self._noted and left > 0:
            chunks = self._noted.pop()  # the latest first
            left -= len(chunks)
            for chunk in chunks.tolist():
                heat[chunk] = heat.get(chunk, 0.0) + weight
            self._waiting.append((chunks, 0))
        self._noted.clear()
        if len(heat) > _HEAT_FACTOR * self._config.chunks_max:
            others = [chunk for chunk in heat if chunk not in self._advertised]
            for chunk in heapq.nsmallest(len(heat) - len(heat) // 2, others, key=heat.__getitem__):
                del heat[chunk]

    def _weight(self, now_s: float) -> float:
        exponent = (now_s - self._heat_since_s) / _HALF_LIFE_S
        if exponent <= _EXPONENT_MAX:
            return float(2.0**exponent)
        scale = float(2.0**-exponent)
        self._heat = {chunk: heat * scale for chunk, heat in self._heat.items()}
        self._heat_since_s = now_s
        return 1.0

    def _check_advertised(self, ready: NDArray[np.bool_]) -> None:
        """Take back what nobody holds, and the coldest where there is no room for others."""
        if not self._unchecked:
            self._unchecked = list(
                self._advertised
            )  # taken from its end, children first: a prefix never lacks its beginning
        batch = [self._unchecked.pop() for _ in range(min(_CHECKED_MAX, len(self._unchecked)))]
        batch = [chunk for chunk in batch if chunk in self._advertised]
        held = self._held(batch, ready)
        for chunk, is_held in zip(batch, held, strict=True):
            if not is_held:
                self._take_back(chunk)
        if self._waiting and len(self._advertised) + len(batch) > self._config.chunks_max:
            kept = [chunk for chunk, is_held in zip(batch, held, strict=True) if is_held]
            leaving = int(_COLD_SHARE * len(batch)) + 1
            for chunk in heapq.nsmallest(leaving, kept, key=self._heat.__getitem__):
                self._take_back(chunk)

    def _advertise(self, ready: NDArray[np.bool_]) -> None:
        """Tell of the hottest chunks of prompts that wait, as far as a worker has computed them."""
        room = min(int(self._credit_bytes) // _HASH_BYTES, self._config.chunks_max - len(self._advertised))
        if room <= 0:
            return
        looked_at: list[tuple[HashArray, int, list[int]]] = []
        candidates: dict[int, float] = {}
        for _ in range(min(len(self._waiting), _LOOKED_AT_MAX)):
            chunks, looks = self._waiting.popleft()
            depth = int(self._tree.match(chunks).depths[ready].max(initial=0))
            names = chunks.tolist()
            looked_at.append((chunks, looks + 1, names))
            candidates.update(
                (name, self._heat.get(name, 0.0)) for name in names[:depth] if name not in self._advertised
            )
        for chunk in heapq.nlargest(room, candidates, key=candidates.__getitem__):  # of equals the first
            self._gone.pop(chunk, None)
            self._heat.setdefault(chunk, 0.0)
            self._advertised[chunk] = self._append(chunk)
        for chunks, looks, names in looked_at:
            if looks < _LOOKS_MAX and names[-1] not in self._advertised:
                self._waiting.append((chunks, looks))

    def _held(self, chunks: list[int], ready: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(n,) bool: a ready worker holds the chunk's last block, and so the blocks before it."""
        if not chunks:
            return np.zeros(0, dtype=np.bool_)
        depths = self._tree.match_many([*np.array(chunks, dtype=np.uint64)[:, None]]).depths
        held: NDArray[np.bool_] = np.any(depths[:, ready] > 0, axis=1)
        return held

    def _take_back(self, chunk: int) -> None:
        del self._advertised[chunk]
        self._gone[chunk] = self._append(chunk)

    def _append(self, chunk: int) -> int:
        self._log.append(chunk)
        self._credit_bytes -= _HASH_BYTES
        return self.version

    def _trim(self) -> None:
        """Shorten the log: its chunks are appended anew, and a link that has not read so far begins anew."""
        while len(self._log) > (_LOG_FACTOR - 1) * self._config.chunks_max:
            cut = self._config.chunks_max
            start, self._log = self._log[:cut], self._log[cut:]
            first, self._first = self._first, self._first + cut
            for version, chunk in enumerate(start, first):
                if self._advertised.get(chunk) == version:
                    self._advertised[chunk] = self._append(chunk)
                elif self._gone.get(chunk) == version:
                    del self._gone[chunk]


_ASKED_S = 60.0
"""After so long without a question, a link that asks begins anew."""
_INTERVAL_S_MAX = 1.0


@dataclass(frozen=True, slots=True)
class _Summary:
    """The advertised prefixes of a model's prompts with one salt; `origin` identifies the numbering of its changes."""

    hot: HotPrefixes
    salt: bytes
    origin: int


class Summaries:
    """Notes prompts of models that a link asks about. One event loop owns it.

    Prompts with a client's or tenant's salt, or of a LoRA adapter, are not advertised: links send them under other salts.
    """

    def __init__(
        self, fleet: Fleet, config: PrefixSummaryConfig, *, hash_key: bytes, rng: random.Random
    ) -> None:
        """Note nothing yet."""
        self._fleet = fleet
        self._config = config
        self._hash_key = hash_key
        self._rng = rng
        self._summaries: dict[str, _Summary] = {}  # by model
        self._asked_s = -math.inf

    def note(self, request: Request) -> None:
        """Note a request that was routed; costs nothing while no link asks."""
        summary = self._summaries.get(request.model)
        if summary is not None and request.salt == summary.salt and not request.embeds:
            summary.hot.note(unpack_hashes(request.block_hashes)[::2])

    def summary(
        self, model: str, cache_salt: str, after: Mapping[int, int], interval_s: float
    ) -> PrefixSummary | None:
        """Give the next changes of a model's advertised prefixes.

        Args:
            model: its name.
            cache_salt: of the asking link's tenant; empty: none.
            after: the last version that the link has of each router's process.
            interval_s: the time since the link asked last, for which it gets bytes; of more than a second one counts.

        Returns:
            None where summaries are off, or where no worker of the model is ready.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s > _ASKED_S:
            self._summaries.clear()
        pool = self._fleet.pools.get(model)
        if pool is None or not self._config.bytes_per_s:
            return None
        ready = pool.workers_only(pool.ready)
        if not ready.any():
            return None
        self._asked_s = now_s
        card = pool.card
        summary = self._summaries.get(model)
        if summary is None or summary.salt != card.salt:
            hot = HotPrefixes(self._fleet.tree, card.block_size, self._config, now_s)
            summary = self._summaries[model] = _Summary(hot, card.salt, self._rng.getrandbits(63))
        bytes_max = int(self._config.bytes_per_s * min(max(interval_s, 0.0), _INTERVAL_S_MAX))
        changes = summary.hot.changes(
            after.get(summary.origin, 0), 0 if cache_salt else bytes_max, ready, now_s
        )
        salt = request_salt(card.salt, cache_salt or None)
        return PrefixSummary(
            origin=summary.origin,
            root=pack_root(root_hash(card.block_size, salt, key=self._hash_key)),
            chunk_tokens=blocks_per_chunk(card.block_size) * card.block_size,
            since=changes.since,
            version=changes.version,
            added=changes.added,
            removed=changes.removed,
        )

    def check(self) -> None:
        """Raise AssertionError where a part is broken."""
        for summary in self._summaries.values():
            summary.hot.check()
