"""Chaos with real tiers: two engines share an arena and have a disk each, while bits flip, disks fail, and engines restart.

The mock engine's KV says of every token which prefix it belongs to, so an engine that gets wrong KV fails its step. Planted
bugs show that the trial finds them.
"""

import asyncio
import contextlib
import random
from collections import Counter

import numpy as np
import pytest

from penstock.core.types.events import Tier
from penstock.core.types.requests import FinishReason
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.block_store import Namespace
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.host_arena import ExtentLayout
from penstock.kv.host_tier import HostTier
from penstock.kv.manager import Offloader
from penstock.kv.slot_file import SlotFile
from penstock.kv.stored_tier import StoredTier
from penstock.testing.engines.probe import make_request
from penstock.testing.loop import run_async
from penstock.transfer.regions.ranges import copy_summed
from tests.support.shared_host import SharedHost
from tests.support.sick_disk import SickDisk

pytestmark = pytest.mark.slow
SIZE, BLOCKS, SLOTS, DISK_SLOTS = 4, 32, 24, 160
BLOCK_BYTES = 8 * SIZE
LAYOUT = ExtentLayout(SLOTS, BLOCK_BYTES)
NAMESPACE = Namespace(model_digest="m", dtype="digests", layout="l", block_size=SIZE)
SHAPE = RunnerInfo(
    num_blocks=BLOCKS, block_size=SIZE, context_length=80, vocab_size=500, kv_bytes_per_block=BLOCK_BYTES
)


class Worker:
    """An engine with tiers, restarted now and then."""

    def __init__(self, host, number, path, rng):
        self.host, self.number, self.path = host, number, path
        self.disk = SickDisk(rng, BLOCK_BYTES)
        self.answers = {}
        self.counts = dict.fromkeys((Tier.HOST, Tier.DISK), (0, 0))
        self.preemptions = 0
        self.stopped = None

    def make_tiers(self, info, memory):
        device = DeviceBlocks.of(memory, info.kv_layout)
        slots = SlotFile(self.path, DISK_SLOTS * 4096, BLOCK_BYTES, NAMESPACE, disk=self.disk, threads=2)
        part = self.host.part(self.number)
        host = HostTier(device, SLOTS, SIZE, part=part, namespace=NAMESPACE)
        host.chunk_blocks = 2
        disk = StoredTier(slots, Tier.DISK, device, DISK_SLOTS, chunk_bytes=3 * BLOCK_BYTES)
        return [host, disk]

    async def start(self):
        self.disk.be("well")
        self.engine = mock_engine(
            SHAPE, MockConfig(speedup=1e6), SchedulerConfig(max_batch_tokens=24), make_tiers=self.make_tiers
        )
        await self.engine.start()
        self.taking = asyncio.get_running_loop().create_task(self._take())

    async def stop(self):
        self.disk.be("well")
        await self.engine.close()
        await self.taking
        if self.stopped is None:
            self.engine.scheduler.check()
        for counts in self.engine.kv.counts:
            loaded, corrupt = self.counts[counts.tier]
            self.counts[counts.tier] = (loaded + counts.loaded_blocks, corrupt + counts.corrupt_blocks)
        self.preemptions += self.engine.load().preemptions

    async def _take(self):
        try:
            async for step in self.engine.steps():
                for delta in step.deltas:
                    self._hear(delta)
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer is told
            self.stopped = error
            for _, end in self.answers.values():
                self._fail(end, f"the engine stopped: {error!r}")

    def _hear(self, delta):
        tokens, end = self.answers.get(delta.request_id, (b"", None))
        if end is None or end.done():
            return  # aborted, or given up
        tokens += delta.token_ids
        self.answers[delta.request_id] = (tokens, end)
        if delta.finish_reason is FinishReason.LENGTH:
            end.set_result(tokens)
        elif delta.finish_reason is not None:
            self._fail(end, delta.error)

    @staticmethod
    def _fail(end, why):
        if not end.done():
            end.set_exception(AssertionError(why))
            end.exception()  # of several at once only one is awaited

    def submit(self, name, tokens, length):
        assert self.stopped is None, self.stopped
        self.answers[name] = (b"", asyncio.get_running_loop().create_future())
        self.engine.submit(make_request(name, tokens, max_tokens=length))
        return self.answers[name][1]

    def abort(self, name):
        self.engine.abort(name)
        del self.answers[name]


def prompts(rng):
    """Conversations that share beginnings."""
    roots = [[rng.randrange(1, 500) for _ in range(24)] for _ in range(6)]
    return [
        root + [rng.randrange(1, 500) for _ in range(rng.randrange(1, 36))]
        for root in roots
        for _ in range(3)
    ]


async def trial(seed, directory):
    rng = random.Random(seed)
    host = SharedHost(slots=SLOTS, block_bytes=BLOCK_BYTES)
    workers = [Worker(host, number, directory / f"{seed}.{number}", rng) for number in range(2)]
    expected = {}
    known = prompts(rng)
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        await turns(rng, host, workers, known, expected)
    return workers


async def turns(rng, host, workers, known, expected):
    """Ask, abort, damage and restart at random; all answers to a prompt are equal."""
    for turn in range(40):
        asked = []
        for n in range(rng.randrange(1, 9)):
            worker, which = rng.choice(workers), rng.randrange(len(known))
            name = f"{turn}.{n}"
            asked.append((worker, which, name, worker.submit(name, known[which], 8)))
        for worker, which, name, answer in asked:
            if rng.random() < 0.15:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if not answer.done():
                    worker.abort(name)
                    continue
            async with asyncio.timeout(60):
                tokens = await answer
            assert tokens == expected.setdefault(which, tokens), "another answer"
        for worker in workers:
            worker.disk.be(rng.choice(["well"] * 9 + ["flips", "flips", "fails", "hangs"]))
        for extent in range(2):
            if rng.random() < 0.5:
                damaged = rng.randrange(LAYOUT.records_offset, LAYOUT.size_bytes)
                host.extent(extent)[damaged] ^= 1 << rng.randrange(8)
        if rng.random() < 0.15:
            worker = rng.choice(workers)
            await worker.stop()
            await worker.start()
        if rng.random() < 0.05:
            rng.choice(workers).engine.clear_cache()


def run_trials(seeds, directory, monkeypatch):
    monkeypatch.setattr("penstock.kv.load_or_compute._LATE_MARGIN_S", 0.02)
    loaded = dict.fromkeys((Tier.HOST, Tier.DISK), 0)
    corrupt = dict.fromkeys((Tier.HOST, Tier.DISK), 0)
    preemptions = 0
    for seed in seeds:
        for worker in run_async(trial(seed, directory), timeout_s=600):
            preemptions += worker.preemptions
            for tier, (blocks, wrong) in worker.counts.items():
                loaded[tier] += blocks
                corrupt[tier] += wrong
    return loaded, corrupt, preemptions


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 12), marks=pytest.mark.nightly)])
def test_answers_are_exact_whatever_happens_to_tiers(tmp_path, monkeypatch, seeds):
    """How often each tier is read depends on the machine: on a busy one more loads are late."""
    loaded, corrupt, preemptions = run_trials(seeds, tmp_path, monkeypatch)
    assert min(loaded.values()) > 0
    assert min(corrupt.values()) > 0
    assert preemptions > 0


def host_unverified(monkeypatch):
    """Loads from hosts compare no checksum."""

    def copied(*arguments):
        sums = copy_summed(*arguments)
        return None if sums is None else np.zeros_like(sums)

    monkeypatch.setattr("penstock.kv.host_tier.copy_summed", copied)


def disk_unverified(monkeypatch):
    """Loads from disks compare no checksum."""
    monkeypatch.setattr("penstock.kv.slot_file.crc32c", lambda _: 0)


def offloads_unpinned(monkeypatch):
    """Blocks may be evicted and overwritten while an offload reads them."""
    make = Offloader.__init__

    class Unpinned:
        def __init__(self, pool):
            self._pool = pool

        def __getattr__(self, name):
            return getattr(self._pool, name)

        def acquire(self, _):
            pass

        release = acquire

    def plant(self, pool, *arguments, **options):
        make(self, pool, *arguments, **options)
        self._pool = Unpinned(pool)
        self.holders = Counter

    monkeypatch.setattr(Offloader, "__init__", plant)


@pytest.mark.parametrize("plant", [host_unverified, disk_unverified, offloads_unpinned])
def test_a_planted_bug_is_caught(plant, tmp_path, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_trials(range(12), tmp_path, monkeypatch)
