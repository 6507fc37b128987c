"""Onboarding: a waiting request's prefix is copied from lower tiers to the device, while the batch runs."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray
from penstock.kv.tiers.tiers import Fetch, TierBlocks, TieredPool, WriteBack


class TierCopier(WriteBack, Protocol):
    """Copies blocks between tiers, and knows how long that takes."""

    def worth(self, runs: Sequence[TierBlocks], cached_tokens: int, known_tokens: int) -> int:
        """Return how many of the leading runs to onboard; computing the rest takes less time.

        Args:
            runs: cached blocks after the first `cached_tokens`; runs of the device cost nothing.
            cached_tokens: leading tokens of the request that the device has.
            known_tokens: all tokens of the request.
        """
        ...

    def fetch(self, fetch: Fetch, done: Callable[[], None]) -> None:
        """Start a fetch; call `done` later, on the event loop, when its targets may be read."""
        ...

    def cancel(self, fetch: Fetch) -> None:
        """Cancel a fetch, finished or not; `done` is not called any more.

        The copier orders later writes to the fetch's targets after those of the fetch itself.
        """
        ...


class Onboarding:
    """The fetches in progress, by request. A scheduler begins them, and takes their results between steps.

    Not thread-safe; one task owns it.
    """

    def __init__(self, pool: TieredPool, copier: TierCopier, on_arrival: Callable[[], None]) -> None:
        """Make an empty set.

        Args:
            pool: the engine's pool.
            copier: the pool's copier.
            on_arrival: called when `take_arrived` may return more.
        """
        self._pool = pool
        self._copier = copier
        self._on_arrival = on_arrival
        self._under_way: dict[RequestId, Fetch] = {}
        self._sizes: dict[RequestId, int] = {}
        self._arrived: list[tuple[RequestId, Fetch]] = []
        self._tokens: dict[Tier, int] = dict.fromkeys((pool.tier for pool in pool.tiers[1:]), 0)

    @property
    def has_arrived(self) -> bool:
        """Whether `take_arrived` may return requests."""
        return bool(self._arrived)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that `count` has counted in each lower `Tier`, host first."""
        lower = tuple(Tier)[1:]
        return tuple(self._tokens.get(tier, 0) for tier in lower)

    def worth(self, block_hashes: HashArray, hits: Sequence[BlockId], known_tokens: int) -> list[TierBlocks]:
        """Find blocks to onboard for a waiting request; empty if computing is quicker.

        Args:
            block_hashes: (n, 2) uint64, blocks of the request that may come from a cache.
            hits: leading blocks that the device has.
            known_tokens: all tokens of the request.
        """
        runs = self._pool.beneath(block_hashes[len(hits) :])
        return (
            runs[: self._copier.worth(runs, len(hits) * self._pool.block_size, known_tokens)] if runs else []
        )

    def count(self, runs: Sequence[TierBlocks], prompt_tokens: int) -> None:
        """Count a request's tokens in lower tiers, up to `prompt_tokens`, the prompt tokens that the device lacks."""
        for run in runs:
            found = min(len(run.block_ids) * self._pool.block_size, prompt_tokens)
            prompt_tokens -= found
            if run.tier in self._tokens:
                self._tokens[run.tier] += found

    def begin(self, request_id: RequestId, runs: Sequence[TierBlocks]) -> list[BlockId]:
        """Start to onboard runs that `worth` found; the device must have enough available blocks.

        Returns:
            device blocks for all runs. The sequence releases them; they are not cached until it commits them.
        """
        fetch, block_ids = self._pool.begin(runs)
        self._under_way[request_id] = fetch
        self._sizes[request_id] = len(block_ids)
        self._copier.fetch(fetch, partial(self._on_done, request_id, fetch))
        return block_ids

    def is_under_way(self, request_id: RequestId) -> bool:
        """Say whether a request's prefix is still being onboarded, or `take_arrived` has not returned it yet."""
        return request_id in self._under_way

    def take_arrived(self) -> list[tuple[RequestId, int]]:
        """Return the requests whose prefix has arrived since the last call, with its blocks, and end their fetches."""
        arrived, self._arrived = self._arrived, []
        names = [request_id for request_id, fetch in arrived if self._under_way.get(request_id) is fetch]
        for request_id in names:
            self._pool.end(self._under_way.pop(request_id))
        return [(request_id, self._sizes.pop(request_id)) for request_id in names]

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request's fetch, if there is one; call it before releasing the request's blocks."""
        fetch = self._under_way.pop(request_id, None)
        if fetch is not None:
            del self._sizes[request_id]
            self._copier.cancel(fetch)
            self._pool.end(fetch)

    @property
    def counts(self) -> KvTierCounts | None:
        """Nothing: simulated tiers fail in no way."""
        return None

    def watch(self, on_room: Callable[[], None]) -> None:
        """Have nothing to tell: device blocks are never pinned."""

    def offload(self, block_hashes: HashArray) -> None:
        """Do nothing: the pool writes back what it evicts."""

    def with_events(self, events: tuple[KvEvent, ...]) -> tuple[KvEvent, ...]:
        """Return the pool's events, which are those of all tiers."""
        return events

    def holders(self) -> Counter[BlockId]:
        """Count its references to device blocks: none beside those of the sequences."""
        return Counter()

    def offloading(self) -> Collection[BlockId]:
        """Return the device blocks that offloads read now: none."""
        return ()

    def check(self) -> None:
        """Raise AssertionError if references to lower blocks differ from the fetches in progress."""
        held: dict[Tier, dict[BlockId, int]] = {pool.tier: {} for pool in self._pool.tiers[1:]}
        for fetch in self._under_way.values():
            for tier, block_ids in fetch.sources:
                for block_id in block_ids:
                    held[tier][block_id] = held[tier].get(block_id, 0) + 1
        for pool in self._pool.tiers[1:]:
            assert held[pool.tier] == pool.references(), (
                f"{pool.tier}: other blocks are held than fetches read"
            )

    def _on_done(self, request_id: RequestId, fetch: Fetch) -> None:
        self._arrived.append((request_id, fetch))
        self._on_arrival()
