"""Engine suite of a prefix cache: cached tokens, and KV events with Penstock's hashes."""

import random
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from penstock.core.hashing import DEFAULT_KEY, block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from penstock.core.wire import PackedHashes, unpack_hashes
from penstock.seams import Engine
from penstock.testing.engines.case import EngineCase
from penstock.testing.engines.probe import EngineSetup, make_request, make_workload


class CachingEngineSuite(EngineCase):
    """Tests of an engine with a prefix cache that sends KV events."""

    async def clear_cache(self, engine: Engine) -> None:
        """Drop the prefix cache of an idle engine; override it where the engine can."""
        raise NotImplementedError

    @property
    def tight(self) -> EngineSetup:
        """Limits under which blocks are evicted soon."""
        return replace(self.setup, kv_blocks=24, context_length=20 * self.setup.block_size)

    def test_blocks_have_the_size_of_the_deployment(self) -> None:
        async def main() -> None:
            async with self.probe() as probe:
                assert probe.info.block_size == self.setup.block_size
                assert probe.info.kv_events

        self.run(main())

    def test_a_prefix_is_computed_once(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(4 * size)

        async def main() -> None:
            async with self.probe() as probe:
                before = probe.engine.load().prefix_hit_tokens
                (first,) = await probe.run(make_request("a", prompt))
                (same,) = await probe.run(make_request("b", prompt))
                (longer,) = await probe.run(make_request("c", prompt + self.prompt(5, 9)))
                (other_salt,) = await probe.run(make_request("d", prompt, salt=b"another tenant"))
                (follow_up,) = await probe.run(
                    make_request("e", prompt + first.token_ids + self.prompt(3, 8))
                )
                cached = [answer.cached_tokens for answer in (first, same, longer, other_salt, follow_up)]
                assert cached == [
                    0,
                    3 * size,
                    4 * size,
                    0,
                    4 * size + (len(first.token_ids) - 1) // size * size,
                ]
                self.check_equal([same, other_salt], [first.token_ids] * 2)
                hits = probe.engine.load().prefix_hit_tokens - before
                assert hits == sum(tokens or 0 for tokens in cached)

        self.run(main())

    def test_hashes_of_the_request_and_of_the_engine_are_equal(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(3 * size + 6)
        request = make_request("b", prompt, salt=b"s")
        hashes = block_hashes(request.token_ids, size, b"s", key=DEFAULT_KEY)

        async def main() -> None:
            async with self.probe() as probe:
                await probe.run(make_request("a", prompt, salt=b"s"))
                await probe.settle()
                assert set(hashes[:, 0].tolist()) <= set(probe.resident())
                (answer,) = await probe.run(
                    structs.replace(request, block_hashes=PackedHashes(hashes.tobytes()))
                )
                assert answer.cached_tokens == 3 * size

        self.run(main())

    def test_stored_blocks_follow_their_parents(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(5 * size)
        hashes = block_hashes(np.array(prompt, dtype=np.int32), size)[:, 0].tolist()

        async def main() -> None:
            async with self.probe() as probe:
                for request_id, blocks in (("a", 2), ("b", 5)):
                    await probe.run(make_request(request_id, prompt[: blocks * size], max_tokens=1))
                await probe.settle()
                stored: list[int] = []
                for event in probe.events:
                    assert isinstance(event, BlockStored)
                    if event.tier is not Tier.DEVICE:
                        continue
                    assert event.parent_block_hash == (stored[-1] if stored else None)
                    assert event.block_size == size
                    stored += unpack_hashes(event.block_hashes).tolist()
                assert stored == hashes

        self.run(main())

    def test_events_match_the_prefix_cache(self) -> None:
        size = self.setup.block_size

        async def main() -> None:
            async with self.probe(self.tight) as probe:
                for index in range(12):
                    prompt = self.prompt(3 * size + index, seed=index % 5)
                    (answer,) = await probe.run(make_request(f"r{index}", prompt, max_tokens=2 * size))
                    await probe.settle()
                    known = np.array(prompt + answer.token_ids, dtype=np.int32)
                    computed = block_hashes(known[:-1], size)[:, 0].tolist()
                    resident = probe.resident()
                    assert set(computed) <= set(resident)
                    assert resident.total() == probe.engine.load().cached_blocks <= probe.info.total_blocks
                assert any(isinstance(event, BlockRemoved) for event in probe.events)
                for event in probe.events:
                    assert not isinstance(event, BlockStored) or event.block_size == size

        self.run(main())

    def test_cached_tokens_are_what_the_events_said(self) -> None:
        size = self.setup.block_size
        rng = random.Random(3)
        vocab_size = self.vocab_size
        requests = 15 if self.events_delay_s else 40  # after each, events are waited for
        workload = make_workload(rng, requests=requests, vocab_size=vocab_size, tokens_max=20 * size)

        async def main() -> None:
            total = 0
            async with self.probe(self.tight) as probe:
                for arrival in workload:
                    request = arrival.request
                    hashes = block_hashes(request.token_ids, size)[:, 0].tolist()
                    resident = probe.resident()
                    known = next((n for n, low in enumerate(hashes) if low not in resident), len(hashes))
                    (answer,) = await probe.run(request)
                    await probe.settle()
                    prompt_tokens = len(request.token_ids) // 4
                    assert answer.cached_tokens == min(known, (prompt_tokens - 1) // size) * size
                    total += answer.cached_tokens
                assert any(isinstance(event, BlockRemoved) for event in probe.events)
            assert total > 0

        self.run(main())

    def test_a_cleared_cache_is_an_event(self) -> None:
        prompt = self.prompt(4 * self.setup.block_size)

        async def main() -> None:
            async with self.probe() as probe:
                await probe.run(make_request("a", prompt))
                await probe.settle()
                assert probe.resident()
                try:
                    await self.clear_cache(probe.engine)
                except NotImplementedError:
                    pytest.skip("its cache cannot be cleared")
                (again,) = await probe.run(make_request("b", prompt))
                await probe.settle()
                assert any(isinstance(event, AllBlocksCleared) for event in probe.events)
                assert again.cached_tokens == 0
                hashes = block_hashes(np.array(prompt, dtype=np.int32), self.setup.block_size)
                assert set(hashes[:, 0].tolist()) <= set(probe.resident())

        self.run(main())
