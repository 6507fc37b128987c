"""KV transfers to a worker whose own tiers have a part of the prompt: each block comes from where it is soonest."""

import asyncio

import pytest

from penstock.core.types.events import Tier
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.device_blocks import DeviceBlocks
from penstock.worker.config import KvTransferConfig, WorkerConfig
from tests.support import kv_transfer_scene
from tests.support.kv_transfer import (
    BLOCK_SIZE,
    TIMING,
    VOCAB,
    SlowTransport,
    tiny_engine,
    tiny_request,
    whole_answer,
)
from tests.support.memory_tier import MemoryTier

CHUNK = 16
LENGTH = 200
BLOCKS = LENGTH // BLOCK_SIZE
READ_S = 0.02
"""Of any read from the prefill worker."""


class Computing:
    """Seconds per prompt token on the test's clock; engines measure on the wall's."""

    is_known = True

    def __init__(self, token_s):
        self.token_s = token_s

    def measure(self, _units, _seconds):
        pass

    def seconds(self, units):
        return units * self.token_s


class Tiered:
    """The tiers of worker d0, and how it and its prefill worker p0 are made."""

    def __init__(self, *kinds, **options):
        self.tiers = []
        self._kinds = kinds or (Tier.HOST,)
        self._options = options

    def engine(self, name):
        if not name.startswith("d"):
            return tiny_engine(chunk_tokens=CHUNK)
        shape = RunnerInfo(
            num_blocks=200,
            block_size=BLOCK_SIZE,
            context_length=400,
            vocab_size=VOCAB,
            kv_bytes_per_block=64,
        )
        config = MockConfig(timing=TIMING, answer_tokens=1000)
        return mock_engine(shape, config, SchedulerConfig(max_batch_tokens=CHUNK), make_tiers=self._make)

    def run(self, scene):
        kv_transfer_scene.run_scenario(
            scene,
            engine=self.engine,
            transport=lambda: SlowTransport(lambda _: READ_S),
            config=WorkerConfig(kv_transfer=KvTransferConfig(pinned_share_max=1.0)),
        )

    def _make(self, info, memory):
        device = DeviceBlocks.of(memory, info.kv_layout)
        self.tiers = [MemoryTier(device, tier=kind, **self._options) for kind in self._kinds]
        return self.tiers


async def fill(cluster, dispatcher, tiered, length=LENGTH):
    """Have the tiers keep a prompt that the device has given up; returns the answer to it."""
    found = await whole_answer(dispatcher, tiny_request("first", length))
    await asyncio.sleep(0.1)
    assert all(tier.num_cached >= length // BLOCK_SIZE for tier in tiered.tiers)
    for name in ("p0", "d0"):
        cluster.engine(name).pool.reset()
        cluster.engine(name).unpin([])  # tells routers
    await asyncio.sleep(0.1)
    cluster.engine("d0").kv.prefill = Computing(1e-3)
    return found


def incoming(cluster):
    return cluster.worker("d0").kv_transfer.incoming


def test_what_a_tier_fails_to_bring_the_prefill_worker_sends():
    tiered = Tiered(block_s=1e-4)

    async def scene(cluster, dispatcher):
        expected = await fill(cluster, dispatcher, tiered)
        tiered.tiers[0].fails = True
        before = incoming(cluster).fetched_blocks
        assert (await whole_answer(dispatcher, tiny_request("again", LENGTH)))[:2] == expected[:2]
        assert tiered.tiers[0].loaded_s, "it was tried"
        assert incoming(cluster).fetched_blocks - before == BLOCKS
        assert incoming(cluster).failures == {}

    tiered.run(scene)


@pytest.mark.parametrize("after_s", [0.005, 0.03, 0.2])
def test_a_load_for_a_request_that_never_comes_is_cancelled(after_s):
    tiered = Tiered(block_s=0.002)

    async def scene(cluster, dispatcher):
        await fill(cluster, dispatcher, tiered)
        async with dispatcher.open(tiny_request("again", LENGTH)) as stream:
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(after_s)
            first.cancel()
        await asyncio.sleep(0.1)
        assert tiered.tiers[0].loaded_s, "it had begun"
        assert tiered.tiers[0].loads == []
        assert cluster.engine("d0").load().active_blocks == 0

    tiered.run(scene)
