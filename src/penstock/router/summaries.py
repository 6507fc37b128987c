"""Summaries of the prefixes that this region holds, for routers of other regions: by model, while a link asks for them."""

import asyncio
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.hashing import root_hash
from penstock.core.types.instances import request_salt
from penstock.core.types.kv import PrefixSummary, blocks_per_chunk, pack_root
from penstock.core.types.requests import Request
from penstock.core.wire import unpack_hashes
from penstock.router.config import PrefixSummaryConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.index.hot_prefixes import HotPrefixes

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
