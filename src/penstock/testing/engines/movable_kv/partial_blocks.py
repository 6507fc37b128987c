"""Engine suite of movable KV, partial blocks: the tokens after a prompt's full blocks, which have no hash, in KV transfers."""

from dataclasses import replace

import numpy as np
from msgspec import structs

from penstock.core.hashing import block_hashes
from penstock.core.ids import BlockId, RequestId
from penstock.core.types.requests import Request
from penstock.core.wire import HashArray
from penstock.testing.engines.movable_kv.moving import MovingCase, MovingEngine, block_bytes, move_blocks
from penstock.testing.engines.probe import EngineProbe, make_request


class EnginePartialBlocks(MovingCase):
    """Tests of `KvPartialBlocks`."""

    def test_partial_blocks_are_transferred(self) -> None:
        size = self.setup.block_size
        for tail in (1, size - 1):
            prompt = self.prompt(3 * size + tail)
            hashes = block_hashes(np.array(prompt, dtype=np.int32), size)

            async def main(prompt: list[int] = prompt, hashes: HashArray = hashes, tail: int = tail) -> None:
                async with self.moving() as source, self.moving() as target, self.moving() as alone:
                    (expected,) = await alone.run(make_request("a", prompt, max_tokens=9))
                    first, kept = await self._first_token(source, prompt)
                    assert kept is not None
                    assert first == expected.token_ids[:1]
                    move_blocks(source, target, hashes)
                    (lent,) = target.engine.reserve(1) or ()
                    block_bytes(target.engine, target.info)[lent] = block_bytes(source.engine, source.info)[
                        kept
                    ]
                    source.engine.unpin([kept])
                    going_on = make_request("b", prompt + first, max_tokens=9, num_emitted=1)
                    target.submit(going_on)
                    target.engine.lend_partial_block(going_on.request_id, lent, tail)
                    await target.finish()
                    assert target.answers["b"].token_ids == expected.token_ids[1:]
                    load = target.engine.load()
                    assert load.prefilled_tokens == 1, "but for the first token all was there"
                    for probe in (source, target):
                        assert probe.engine.load().active_blocks == 0

            self.run(main())

    def test_a_partial_block_without_its_full_blocks_is_computed_again(self) -> None:
        size = self.setup.block_size
        prompt = self.prompt(2 * size + 3)

        async def main() -> None:
            async with self.moving() as source, self.moving() as target:
                (expected,) = await source.run(make_request("a", prompt))
                lent = target.engine.reserve(3) or ()
                for number, block_id in enumerate(lent):
                    request = make_request(f"b{number}", prompt)
                    if number:
                        target.submit(request)
                    target.engine.lend_partial_block(
                        request.request_id, block_id, 3
                    )  # the first engine knows no such request
                target.abort("b1")
                assert target.engine.load().active_blocks == 1
                await target.finish()
                assert target.answers["b2"].token_ids == expected.token_ids
                assert target.engine.load().prefilled_tokens == len(prompt)
                assert target.engine.load().active_blocks == 0

        self.run(main())

    def test_unclaimed_partial_blocks_are_freed(self) -> None:
        size = self.setup.block_size

        async def main() -> None:
            async with self.moving(replace(self.setup, kv_blocks=12)) as probe:
                _, full = await self._first_token(probe, self.prompt(2 * size))
                assert full is None
                _, kept = await self._first_token(probe, self.prompt(2 * size + 1, 3))
                assert kept is not None
                before = block_bytes(probe.engine, probe.info)[kept].copy()
                await probe.run(make_request("other", self.prompt(8 * size, 5), max_tokens=size))
                np.testing.assert_array_equal(block_bytes(probe.engine, probe.info)[kept], before)
                probe.engine.unpin([kept])
                probe.submit(_transferred("late", self.prompt(2 * size + 1, 7)))
                await probe.finish()
                assert probe.engine.load().active_blocks <= 1
                await probe.run(make_request("next", self.prompt(3, 8), max_tokens=1))
                assert probe.engine.claim_partial_block(RequestId("late")) is None
                assert probe.engine.load().active_blocks == 0

        self.run(main())

    async def _first_token(
        self, probe: EngineProbe[MovingEngine], prompt: list[int]
    ) -> tuple[list[int], BlockId | None]:
        """Compute a prompt like a prefill worker; return its first token and its pinned partial block."""
        request = _transferred(f"prompt{len(probe.answers)}", prompt)
        probe.submit(request)
        while (
            request.request_id not in probe.answers or probe.answers[request.request_id].finish_reason is None
        ):
            await probe.step()
        kept = probe.engine.claim_partial_block(request.request_id)
        return probe.answers[request.request_id].token_ids, kept


def _transferred(name: str, prompt: list[int]) -> Request:
    return structs.replace(make_request(name, prompt, max_tokens=1), prefill_only=True)
