"""A vLLM engine whose KV events go into a prefix index."""

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Holder, Tier
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import hash_list, pack_hashes, pack_tokens, unpack_tokens
from penstock.router.radix import RadixTree
from tests.vllm.conftest import BLOCK, Running

KEY = bytes(range(16))
QUIET_S = 1.0
"""After so long without a step that tells something all events are here."""


def prompt(length: int, seed: int) -> list[int]:
    return [(token * (2 * seed + 3) + seed) % 390 + 5 for token in range(length)]


class Indexed:
    """An engine whose events go into an index, and the requests that it had."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.tree = RadixTree(10_000)
        self.names: set[int] = set()
        """Hashes of all blocks that requests can have had."""
        self.kinds: set[type] = set()
        self.holders: set[Holder] = set()
        """Who keeps the blocks of lower tiers."""
        self.number = 0
        self.emitted: list[list[int]] = []
        """Tokens of the latest requests."""
        self.next: asyncio.Task[Step] | None = None

    def _note(self, step: Step) -> None:
        for event in step.events:
            self.kinds.add(type(event))
            if isinstance(event, BlockStored) and event.tier is not Tier.DEVICE:
                self.holders.add(event.holder)
            match event:
                case BlockStored():
                    assert event.block_size == BLOCK
                    self.tree.store(0, event.block_hashes, event.parent_block_hash, event.tier)
                case BlockRemoved():
                    self.tree.remove(0, event.block_hashes, event.tier)
                case AllBlocksCleared():
                    self.tree.clear(0)

    def _request(
        self, ids: list[int], salt: bytes = b"", tokens: int = 4, adapter: str | None = None
    ) -> Request:
        self.number += 1
        return Request(
            request_id=f"k{self.number}",
            model="tiny",
            token_ids=pack_tokens(ids),
            block_hashes=pack_hashes(block_hashes(ids, BLOCK, salt, key=KEY).ravel()),
            salt=salt,
            adapter=adapter,
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        )

    async def _run(self, requests: list[Request]) -> list[int]:
        cached, open_ = {}, {request.request_id: request for request in requests}
        emitted: dict[Any, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.running.engine.submit(request)
        loop = asyncio.get_running_loop()
        told_s = loop.time()
        while open_ or loop.time() - told_s < QUIET_S:
            if self.next is None:
                self.next = asyncio.create_task(self.running.next_step())
            done, _ = await asyncio.wait([self.next], timeout=None if open_ else QUIET_S)
            if not done:
                break
            step, self.next = self.next.result(), None
            if step.deltas or step.events:
                told_s = loop.time()
            for delta in step.deltas:
                if delta.request_id not in emitted:
                    continue  # of a request that was aborted
                emitted[delta.request_id] += unpack_tokens(delta.token_ids).tolist()
                if delta.cached_tokens is not None:
                    cached[delta.request_id] = delta.cached_tokens
                if delta.finish_reason is not None:
                    open_.pop(delta.request_id)
            self._note(step)
        for request in requests:
            tokens = unpack_tokens(request.token_ids).tolist() + emitted[request.request_id]
            self.names |= set(hash_list(block_hashes(tokens, BLOCK, request.salt, key=KEY)[:, 0]))
        self.emitted = [emitted[request.request_id] for request in requests]
        return [cached[request.request_id] for request in requests]

    async def _abort(self, request: Request, steps: int) -> None:
        self.running.engine.submit(request)
        for _ in range(steps):
            if self.next is None:
                self.next = asyncio.create_task(self.running.next_step())
            await asyncio.wait([self.next])
            step, self.next = self.next.result(), None
            self._note(step)
        self.running.engine.abort(request.request_id)

    def abort(self, ids: list[int], *, steps: int) -> None:
        """Submit a prompt, and abort it after so many steps."""
        self.running.do(self._abort(self._request(ids), steps))

    async def _wait_until(self, is_so: Callable[[WorkerLoad], bool]) -> None:
        while not is_so(self.running.engine.load()):
            if self.next is None:
                self.next = asyncio.create_task(self.running.next_step())
            step, self.next = await self.next, None
            self._note(step)

    def wait_until(self, is_so: Callable[[WorkerLoad], bool]) -> None:
        """Take steps, without requests, until the load is so."""
        self.running.do(self._wait_until(is_so))

    def run(
        self, *prompts: list[int], salt: bytes = b"", tokens: int = 4, adapter: str | None = None
    ) -> list[int]:
        """Run prompts at the same time; return the tokens that vLLM found in its cache."""
        requests = [self._request(ids, salt, tokens, adapter) for ids in prompts]
        return self.running.do(self._run(requests))

    def known(self, ids: list[int], salt: bytes = b"") -> int:
        """Tokens of a prompt that the index says vLLM has."""
        depths = self.tree.match_tokens(ids, BLOCK, salt, key=KEY).depths
        return int(depths[0]) * BLOCK if len(depths) else 0

    def check(self) -> None:
        held = hash_list(self.tree.hashes_of(0))
        assert set(held) <= self.names, "every block is one of a request, hashed as a frontend hashes it"
        stats = self.tree.stats()
        assert not stats.unknown_removals
        assert not stats.contradictions


def reusable(ids: list[int]) -> int:
    """Tokens of a cached prompt that vLLM uses again: it computes at least the last one, with its whole block."""
    return (len(ids) - 1) // BLOCK * BLOCK
