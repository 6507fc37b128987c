"""Engine suite of a managed KV cache: sessions of agents, and what operators do."""

from dataclasses import replace

from msgspec import structs

from penstock.core.hashing import DEFAULT_KEY, block_hashes
from penstock.core.types.events import Tier
from penstock.core.types.kv import KvEvict, KvFlush, KvList, KvPin, KvReport, KvUnpin
from penstock.core.types.requests import Request, SessionAction, SessionControl
from penstock.core.wire import PackedHashes
from penstock.seams import Engine, KvManaged
from penstock.testing.engines.case import EngineCase
from penstock.testing.engines.probe import EngineProbe, EngineSetup, make_request

_NUM_BLOCKS = 24


class KvManagedSuite(EngineCase):
    """Tests of `KvManaged`, and of sessions that keep at least a third of the blocks."""

    @property
    def small(self) -> EngineSetup:
        """Limits under which blocks are evicted soon."""
        return replace(self.setup, kv_blocks=_NUM_BLOCKS, context_length=20 * self.setup.block_size)

    def test_a_session_keeps_its_prefix_until_it_is_closed(self) -> None:
        async def main() -> None:
            async with self.probe(self.small) as probe:
                first = self._turn("a", SessionAction.OPEN)
                (answer,) = await probe.run(first)
                await self._pass_by(probe)
                (again,) = await probe.run(self._turn("b"))
                assert again.cached_tokens == 3 * self.setup.block_size
                assert again.token_ids == answer.token_ids
                sessions = probe.engine.load().sessions
                assert sessions is not None
                assert (sessions.open, sessions.opened) == (1, 1)
                await probe.run(self._turn("c", SessionAction.CLOSE))
                assert probe.engine.load().active_blocks == 0
                await self._pass_by(probe, start=20)
                (last,) = await probe.run(self._turn("d"))
                assert last.cached_tokens == 0

        self.run(main())

    def test_a_request_that_needs_all_blocks_runs_beside_a_session(self) -> None:
        async def main() -> None:
            async with self.probe(self.small) as probe:
                await probe.run(self._turn("a", SessionAction.OPEN))
                long = make_request("long", self.prompt(19 * self.setup.block_size, 50))
                (answer,) = await probe.run(long)
                assert answer.error is None
                sessions = probe.engine.load().sessions
                assert sessions is not None
                assert sessions.open + sessions.yielded == 1

        self.run(main())

    def test_operators_pin_list_evict_and_flush(self) -> None:
        size = self.setup.block_size
        request = make_request("a", self.prompt(4 * size))
        packed = PackedHashes(block_hashes(request.token_ids, size, key=DEFAULT_KEY).tobytes())

        async def main() -> None:
            async with self.probe(self.small) as probe:
                engine = probe.engine
                assert isinstance(engine, KvManaged), "its cache cannot be managed"
                await probe.run(request)
                assert engine.act(KvPin(name="p", block_hashes=packed)) == KvReport(blocks=4)
                assert [held.blocks for held in engine.act(KvList()).held] == [4]
                await self._pass_by(probe)
                assert engine.act(KvEvict(block_hashes=packed)) == KvReport()
                (again,) = await probe.run(structs.replace(request, request_id="b"))
                assert again.cached_tokens == 3 * size
                assert engine.act(KvUnpin(name="p")) == KvReport(blocks=4)
                assert engine.act(KvEvict(block_hashes=packed)) == KvReport(blocks=4)
                assert engine.act(KvFlush(tier=Tier.DEVICE)).blocks > 0
                assert engine.load().cached_blocks == 0
                await probe.run(structs.replace(request, request_id="c"))
                await probe.settle()
                assert probe.resident().total() == engine.load().cached_blocks > 0, "routers hear of it"
                engine.act(KvFlush())
                (last,) = await probe.run(structs.replace(request, request_id="d"))
                assert last.cached_tokens == 0

        self.run(main())

    def _turn(self, name: str, action: SessionAction | None = None) -> Request:
        """Make a request of one session, always with the same prompt of four blocks."""
        request = make_request(name, self.prompt(4 * self.setup.block_size), max_tokens=4)
        control = None if action is None else SessionControl(action=action, ttl_s=600)
        return structs.replace(request, session="agent", session_control=control)

    async def _pass_by(self, probe: EngineProbe[Engine], start: int = 0) -> None:
        """Have other prompts fill the cache, one after the other."""
        for number in range(start, start + 8):
            await probe.run(
                make_request(f"other{number}", self.prompt(5 * self.setup.block_size, 7 + number))
            )
