"""Engine suite of a managed KV cache: what operators do."""

from dataclasses import replace

from msgspec import structs

from penstock.core.hashing import DEFAULT_KEY, block_hashes
from penstock.core.types.events import Tier
from penstock.core.types.kv import KvEvict, KvFlush, KvList, KvPin, KvReport, KvUnpin
from penstock.core.wire import PackedHashes
from penstock.seams import Engine, KvManaged
from penstock.testing.engines.case import EngineCase
from penstock.testing.engines.probe import EngineProbe, EngineSetup, make_request

_NUM_BLOCKS = 24


class KvManagedSuite(EngineCase):
    """Tests of `KvManaged`, where pins keep at least a third of the blocks."""

    @property
    def small(self) -> EngineSetup:
        """Limits under which blocks are evicted soon."""
        return replace(self.setup, kv_blocks=_NUM_BLOCKS, context_length=20 * self.setup.block_size)

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
                assert [pin.blocks for pin in engine.act(KvList()).pins] == [4]
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

    async def _pass_by(self, probe: EngineProbe[Engine], start: int = 0) -> None:
        """Have other prompts fill the cache, one after the other."""
        for number in range(start, start + 8):
            await probe.run(
                make_request(f"other{number}", self.prompt(5 * self.setup.block_size, 7 + number))
            )
