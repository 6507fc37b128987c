"""A start of vLLM with KV tiers: it ends once the scheduler of every rank has told what they keep, over a fake core client."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.types.events import AllBlocksCleared, BlockStored, Holder, KvEvent, Tier
from penstock.core.types.instances import EngineInfo, KvHolder, Role
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import pack_hashes
from penstock.engine.kv_tiers import KvConfig
from penstock.engine.launch import EngineLaunch, SymbolicHost
from penstock.engine.registry import describe_launch
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm import engine as engine_module
from penstock.engine.vllm.engine import VllmEngine
from penstock.engine.vllm.tiers.stats import pack_stats

KEY = bytes(range(16))
STORED = BlockStored(block_hashes=pack_hashes([7]), parent_block_hash=None, block_size=32, tier=Tier.HOST)
STEP_S = 5.0


class StartingCore:
    """Has a message every `STEP_S` seconds; none is left to wait for at the end."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages
        self.woken_s: list[float] = []
        self.resources = SimpleNamespace(engine_manager=None)
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=64, block_size=32),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            model_config=SimpleNamespace(max_model_len=512),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8),
        )

    async def get_output_async(self) -> Any:
        if not self.messages:
            await asyncio.Event().wait()
        await asyncio.sleep(STEP_S)
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    async def is_sleeping_async(self) -> bool:
        self.woken_s.append(asyncio.get_running_loop().time())
        return False


def told(rank: int, *events: KvEvent, known: bool = True, holders: Sequence[KvHolder] = ()) -> Any:
    """Make the message of a step without outputs; `known`: the rank's device processes have all reported."""
    counts = [KvTierCounts(tier=Tier.HOST, total_blocks=4, cached_blocks=len(events), block_bytes=10)]
    stats = pack_stats(counts if known else [], events, holders)
    statistics = SimpleNamespace(num_running_reqs=0, kv_cache_usage=0.0, kv_connector_stats=stats)
    return SimpleNamespace(engine_index=rank, outputs=[], scheduler_stats=statistics)


async def started(
    monkeypatch: pytest.MonkeyPatch, messages: list[Any], *, ranks: int = 1, **kv: str
) -> tuple[VllmEngine, EngineInfo, float]:
    """Start over the fake; give the engine, what it says of itself, and the seconds that it took."""
    core = StartingCore(messages)

    async def no_adapters(*_: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(engine_module, "engine_launch", lambda *_: EngineLaunch(call="", arguments={}))
    monkeypatch.setattr(engine_module, "launch", lambda *_: (core, None))
    monkeypatch.setattr(engine_module, "load_adapters", no_adapters)
    monkeypatch.setattr(engine_module, "MediaReader", lambda _: SimpleNamespace(kinds=()))
    engine = VllmEngine(
        EngineSpec(
            model="m", block_size=32, data_parallel=ranks, kv=KvConfig.model_validate(kv), hash_key=KEY
        )
    )
    before_s = asyncio.get_running_loop().time()
    return engine, await engine.start(), asyncio.get_running_loop().time() - before_s


@pytest.mark.virtual
async def test_a_start_ends_when_the_tiers_are_known_and_their_blocks_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, info, seconds = await started(
        monkeypatch, [told(0, known=False), told(0, STORED), told(0)], host="2x"
    )
    assert info.block_size == 32
    assert seconds == 2 * STEP_S
    assert [counts.cached_blocks for counts in engine.load().kv_tiers] == [1]
    step = await anext(engine.steps())
    assert step.events == (STORED,)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.virtual
async def test_one_rank_tells_of_shared_blocks_and_the_others_are_woken_to_hear_of_them(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """If the holder is not known in time, its blocks are told as the worker's own."""

    holders = [KvHolder(kind=Holder.HOST, id="arena", blocks=8)] if is_known else []
    shared = replace(STORED, holder=Holder.HOST)
    cleared = AllBlocksCleared(holder=Holder.HOST)
    messages = [
        told(rank, *events, holders=holders) for rank, events in enumerate([(cleared, shared), (shared,)])
    ]
    engine, info, _ = await started(monkeypatch, messages, ranks=2, host="2x")
    assert info.kv_holders == tuple(holders)
    assert info.lower_tier_blocks == (0 if is_known else 4)
    core = engine._core
    await asyncio.sleep(35.0)
    assert len(core.woken_s) == (3 if is_known else 0)
    steps = engine.steps()
    found = [(await anext(steps)).events for _ in range(2)]
    assert found == ([(cleared, shared), ()] if is_known else [(STORED,), (STORED,)])
    engine._core = None
    await engine.close()
    await asyncio.sleep(20.0)
    assert len(core.woken_s) == (3 if is_known else 0)


def test_a_start_has_what_its_description_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock graph render` prints the description; only ports are found at the start."""
    spec = EngineSpec(model="m", block_size=32, device="cuda:2", role=Role.DECODE, args={"seed": 3})
    given: list[EngineLaunch] = []

    async def scene() -> None:
        def launch(_spec: EngineSpec, _output: Any, described: EngineLaunch) -> Any:
            given.append(described)
            return StartingCore([]), None

        async def no_adapters(*_: Any) -> dict[str, Any]:
            return {}

        monkeypatch.setattr(engine_module, "launch", launch)
        monkeypatch.setattr(engine_module, "load_adapters", no_adapters)
        monkeypatch.setattr(engine_module, "MediaReader", lambda _: SimpleNamespace(kinds=()))
        monkeypatch.setattr(engine_module, "end", lambda _: None)
        for name in ("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "VLLM_NO_USAGE_STATS"):
            monkeypatch.delenv(name, raising=False)
        engine = VllmEngine(spec)
        await engine.start()
        await engine.close()

    asyncio.run(scene())
    (start,), described = given, describe_launch("vllm", spec, SymbolicHost())
    assert start.arguments == described.arguments
    assert start.environment.keys() == described.environment.keys()
    changed = {name for name in start.environment if start.environment[name] != described.environment[name]}
    assert changed == {"VLLM_NIXL_SIDE_CHANNEL_PORT"}
    assert start.arguments["kv_transfer_config"]["kv_connector"] == "NixlConnector"
