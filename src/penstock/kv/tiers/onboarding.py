"""Requests whose prefix lies in lower tiers, and is brought into the device beside the batch before they are computed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.tiers.tiers import Fetch, TierBlocks, TieredPool, WriteBack


class TierCopier(WriteBack, Protocol):
    """Moves blocks between tiers, and knows how long that takes."""

    def worth(self, runs: Sequence[TierBlocks], cached_tokens: int, known_tokens: int) -> int:
        """Say how many of the leading runs to take from their tiers; what follows is computed, as that takes less time.

        Args:
            runs: what is there after the first `cached_tokens`; the device's own cost nothing.
            cached_tokens: what the device has.
            known_tokens: what the request has in all.
        """
        ...

    def fetch(self, fetch: Fetch, done: Callable[[], None]) -> None:
        """Begin a fetch, and call `done` later, on the event loop, when its targets may be read."""
        ...

    def cancel(self, fetch: Fetch) -> None:
        """Give a fetch up that is not done, or is: what writes to its targets next does so after it, and `done` is not called any more."""
        ...


class Onboarding:
    """The fetches under way, by request. A scheduler decides when one begins, and takes it over between steps.

    Not thread-safe; one task owns it.
    """

    def __init__(self, pool: TieredPool, copier: TierCopier, on_arrival: Callable[[], None]) -> None:
        """Begin with none.

        Args:
            pool: the engine's.
            mover: the pool's as well.
            on_arrival: called whenever `take_arrived` may have more.
        """
        self._pool = pool
        self._copier = copier
        self._on_arrival = on_arrival
        self._under_way: dict[RequestId, Fetch] = {}
        self._arrived: list[tuple[RequestId, Fetch]] = []
        self._tokens: dict[Tier, int] = dict.fromkeys((pool.tier for pool in pool.tiers[1:]), 0)

    @property
    def has_arrived(self) -> bool:
        """Whether `take_arrived` may have something."""
        return bool(self._arrived)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that `count` was told of, for each lower `Tier`, host first."""
        lower = tuple(Tier)[1:]
        return tuple(self._tokens.get(tier, 0) for tier in lower)

    def worth(self, block_hashes: HashArray, hits: Sequence[BlockId], known_tokens: int) -> list[TierBlocks]:
        """Find what to fetch for a request that waits; nothing where computing is quicker.

        Args:
            block_hashes: (n, 2) uint64, what it may take from a cache.
            hits: the leading blocks that the device has.
            known_tokens: the request's.
        """
        runs = self._pool.beneath(block_hashes[len(hits) :])
        return (
            runs[: self._copier.worth(runs, len(hits) * self._pool.block_size, known_tokens)] if runs else []
        )

    def count(self, runs: Sequence[TierBlocks], prompt_tokens: int) -> None:
        """Count what a request finds beneath the device, of the `prompt_tokens` of its prompt that are left for it."""
        for run in runs:
            found = min(len(run.block_ids) * self._pool.block_size, prompt_tokens)
            prompt_tokens -= found
            if run.tier in self._tokens:
                self._tokens[run.tier] += found

    def begin(self, request_id: RequestId, runs: Sequence[TierBlocks]) -> list[BlockId]:
        """Begin to fetch what `worth` found; the device has room for it.

        Returns:
            The device's blocks for all runs, the sequence's to release. They are no cached ones until it commits them.
        """
        fetch, block_ids = self._pool.begin(runs)
        self._under_way[request_id] = fetch
        self._copier.fetch(fetch, partial(self._on_done, request_id, fetch))
        return block_ids

    def is_under_way(self, request_id: RequestId) -> bool:
        """Tell whether a request's prefix is not there yet, or not taken over."""
        return request_id in self._under_way

    def take_arrived(self) -> list[RequestId]:
        """Name the requests whose prefix has come since the last call, in this order; they are under way no longer."""
        arrived, self._arrived = self._arrived, []
        names = [request_id for request_id, fetch in arrived if self._under_way.get(request_id) is fetch]
        for request_id in names:
            self._pool.end(self._under_way.pop(request_id))
        return names

    def cancel(self, request_id: RequestId) -> None:
        """Give a request's fetch up, if there is one, before its blocks are released."""
        fetch = self._under_way.pop(request_id, None)
        if fetch is not None:
            self._copier.cancel(fetch)
            self._pool.end(fetch)

    def check(self) -> None:
        """Raise AssertionError where lower blocks are held by other than the fetches under way."""
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
