"""Seeded faults on workers that lend each other what their hosts' memory keeps: answers are exact, and afterwards nothing is lent.

Each worker is on a host of its own, with a real host tier below a device of two prompts and a half. Engines check each read of KV; reads
take their time and copy at its end, whatever the memory holds by then.
"""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from unittest import mock

import msgspec
import numpy as np
import pytest

from penstock.core.hashing import block_hashes
from penstock.core.wire import unpack_tokens
from penstock.engine import batched
from penstock.engine.batched import BatchedEngine
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.host import copies
from penstock.kv.host.host_tier import HostTier
from penstock.kv.host.loan import HostLoan
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.worker.config import KvTransferConfig, WorkerConfig
from penstock.worker.kv_transfer import peer_source
from penstock.worker.kv_transfer.exports import KvExports
from penstock.worker.kv_transfer.peer_source import PeerSource
from penstock.worker.kv_transfer.reader import LentMismatch, Reader
from penstock.worker.kv_transfer.regions import KvRegions
from tests.support.chaos import (
    Mutants,
    cut_between_workers,
    read_and_compare,
    references,
    run_trial,
    run_trials,
)
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import (
    BLOCK_SIZE,
    PRICES,
    TIMING,
    SlowTransport,
    check_nothing_is_held,
    tiny_engine,
    tiny_request,
)

pytestmark = pytest.mark.slow

NAMES = ("a0", "a1", "a2")
CLIENTS = 60
LAST_S = 2.0
QUIET_S = 20.0
TOKENS = 12
PROMPTS = [(84, seed) for seed in range(1, 7)] + [(40, seed) for seed in range(1, 5)]
KV_BLOCKS, HOST_BLOCKS = 56, 72
"""A device keeps two prompts and a half, a host three."""
BLOCK_BYTES = 64
LINK_BYTES_PER_S = 1e9


@pytest.fixture(scope="module")
def answers():
    return references(PROMPTS, TOKENS)


class LendingTrial:
    """One deployment, its clients and its faults."""

    def __init__(self, rng, answers):
        self.outcomes = Counter()
        self.rng = rng
        self.answers = answers
        self.cluster = MemoryCluster(rng.getrandbits(32), lease_ttl_s=1.0)
        self.config = WorkerConfig(
            drain_timeout_s=0.5,
            kv_transfer=KvTransferConfig(
                peers=True,
                pin_ttl_s=rng.choice((0.02, 1.0, 1.0)),  # the first is less than some reads take
                pinned_share_max=0.9,
                checksum=rng.random() < 0.5,
            ),
        )
        self.slowest_s = rng.choice((0.002, 0.06, 0.2))
        self.tiers = {}

    async def run(self):
        rng = self.rng
        async with AsyncExitStack() as stack:
            stack.enter_context(mock.patch.object(BatchedEngine, "_compute_s", compute_s))
            stack.enter_context(mock.patch.object(HostTier, "probe", staticmethod(lambda: 1e9)))
            for module in (batched, copies):  # what they measure counts in decisions
                stack.enter_context(
                    mock.patch.object(module, "perf_counter", asyncio.get_running_loop().time)
                )
            stack.enter_context(mock.patch.object(peer_source, "_CHUNK_BYTES", 4 * BLOCK_BYTES))
            stack.enter_context(mock.patch.object(Reader, "read", self.noting_mismatches(Reader.read)))
            await stack.enter_async_context(self.cluster)
            for name in NAMES:
                await self.start(name)
            router = RouterConfig(
                policy=rng.choice(("round-robin", "kv")),
                disagg=DisaggConfig(link_bytes_per_s=LINK_BYTES_PER_S),
                no_worker_wait_s=3.0,
            )
            dispatcher = await stack.enter_async_context(self.cluster.dispatcher(router))
            await dispatcher.looked()
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(self.client(number, dispatcher, rng.uniform(0, LAST_S)))
                group.create_task(self.kill_a_lender(rng.uniform(0.5, LAST_S)))
                for _ in range(2):
                    group.create_task(self.cut_between_workers(rng.uniform(0, LAST_S)))
            await asyncio.sleep(QUIET_S)
            for name in NAMES:
                self.note(name)
                check_nothing_is_held(self.cluster.worker(name), self.cluster.engine(name))
                self.check_contents(name)
            dispatcher.check()
        assert not self.outcomes["mismatches"], "lent blocks were overwritten while they were lent"
        return self.outcomes

    async def start(self, name):
        rng = random.Random(self.rng.getrandbits(32))

        def tiers(info, memory):
            device = DeviceBlocks.of(memory, info.kv_layout)
            self.tiers[name] = HostTier(device, HOST_BLOCKS, info.block_size)
            return [self.tiers[name]]

        await self.cluster.start(
            name,
            tiny_engine(KV_BLOCKS, BLOCK_BYTES, chunk_tokens=24, make_tiers=tiers),
            config=self.config,
            prices=PRICES,
            transport=SlowTransport(lambda _: rng.uniform(0, self.slowest_s)),
        )

    async def client(self, number, dispatcher, at_s):
        rng = random.Random(self.rng.getrandbits(32))
        await asyncio.sleep(at_s)
        prompt = rng.choice(PROMPTS)
        asked = tiny_request(f"r{number}", prompt[0], TOKENS, seed=prompt[1])
        request = msgspec.structs.replace(asked, deadline_s=0.3 if rng.random() < 0.1 else None)
        leaves_s = rng.uniform(0.0, 0.3) if rng.random() < 0.2 else None
        outcome = await read_and_compare(dispatcher, request, self.answers[prompt], leaves_s=leaves_s)
        self.outcomes[outcome] += 1

    async def kill_a_lender(self, at_s):
        """Kill a worker while another one reads what its host's memory keeps, and start it again without its memory."""
        await asyncio.sleep(at_s)
        for _ in range(2000):
            lending = [name for name in NAMES if self.exports(name)._lent_blocks]
            if lending:
                break
            await asyncio.sleep(1e-3)
        name = lending[0] if lending else NAMES[0]
        self.outcomes["lender killed"] += bool(lending)
        self.note(name)
        self.cluster.kill(name)
        await asyncio.sleep(0.2)
        await self.start(name)

    async def cut_between_workers(self, at_s):
        rng = random.Random(self.rng.getrandbits(32))
        await asyncio.sleep(at_s)
        self.outcomes["cut"] += cut_between_workers(self.cluster, rng)

    def exports(self, name):
        return self.cluster.worker(name).kv_transfer.exports

    def note(self, name):
        assert not self.cluster.engine(name).load().failed_steps, f"{name}: read KV of another prefix"
        loads = self.cluster.worker(name).kv_transfer.peer_loads
        self.outcomes["from peers"] += loads.loaded_tokens
        self.outcomes["broken off"] += loads.failures

    def noting_mismatches(self, original):
        async def read(reader, origin, pin_id, targets, sources, lent):
            try:
                await original(reader, origin, pin_id, targets, sources, lent)
            except LentMismatch:
                self.outcomes["mismatches"] += 1
                raise
            self.outcomes["lent"] += len(lent)

        return read

    def check_contents(self, name):
        """Raise AssertionError where a block of a device or of its host is not what its name says, or a host's block is still held."""
        kv, tier = self.cluster.engine(name)._runner._kv, self.tiers[name]
        tier.check()
        assert tier._pool.num_available == HOST_BLOCKS, f"{name}: blocks of its host are held"
        host = DeviceBlocks(tier._extent._data_address, BLOCK_BYTES, tier)
        for length, seed in PROMPTS:
            request = tiny_request("", length, seed=seed)
            digests = np.cumsum(kv._terms(unpack_tokens(request.token_ids), np.arange(length)))
            hashes = block_hashes(request.token_ids, BLOCK_SIZE)
            on_device = kv._cells[self.cluster.engine(name).pool.match(hashes)].ravel()
            on_host = np.concatenate(
                [
                    np.zeros(0, "<u8"),
                    *(view[: 8 * BLOCK_SIZE].view("<u8") for view in host.views(tier._pool.match(hashes))),
                ]
            )
            for cells in (on_device, on_host):
                assert (cells == digests[: len(cells)]).all(), f"{name}: a block of another prefix"


def compute_s(_engine, new_tokens, _cached_tokens):
    """Predict more than computing takes, so that slow reads are tried too."""
    return 10 * TIMING.prefill_s_per_token * new_tokens


def run_lending_trial(seed, answers):
    return run_trial(lambda rng: LendingTrial(rng, answers).run(), seed)


SEEDS = range(24)


@pytest.mark.parametrize("seeds", [SEEDS[:8], pytest.param(SEEDS, marks=pytest.mark.nightly)], ids=len)
def test_lenders_may_die_and_answers_are_exact(answers, seeds):
    outcomes = run_trials(lambda seed: run_lending_trial(seed, answers), seeds)
    assert outcomes["length"] > CLIENTS * len(seeds) / 2
    assert outcomes["unavailable"] + outcomes["overloaded"] < CLIENTS * len(seeds) / 20
    assert outcomes["lender killed"] > len(seeds) / 3
    for kind in ("left", "deadline_exceeded", "lent", "from peers", "broken off", "cut"):
        assert outcomes[kind] > len(seeds) / 5, f"{kind}: {outcomes}"


MUTANTS = Mutants()
mutant = MUTANTS.plant


@mutant
def lent_blocks_that_are_not_held():
    """A host's blocks are evicted while others read them."""
    original = HostLoan.__init__

    def lend(self, tier, load, number):
        with mock.patch.object(HostTier, "hold"):
            original(self, tier, load, number)

    with mock.patch.object(HostLoan, "__init__", lend), mock.patch.object(HostLoan, "_let_go"):
        yield


@mutant
def loan_that_never_ends():
    """A reader that is done, or whose time is over, leaves blocks held."""
    with mock.patch.object(HostLoan, "end"):
        yield


@mutant
def read_that_counts_though_its_lender_died():
    """What a read was to bring is published, whatever came of it."""
    original = PeerSource._read

    async def read(self, *args):
        await original(self, *args)
        self.error = None

    with mock.patch.object(PeerSource, "_read", read):
        yield


@mutant
def lender_that_says_yes():
    """A lender says of any pin that it is held."""
    with mock.patch.object(KvExports, "holds", return_value=True):
        yield


@mutant
def lent_blocks_in_another_order():
    """A lender names the place of each block after the next one."""
    original = KvRegions.pack_lent

    def pack(self, blocks):
        moved = blocks.copy()
        moved["offset"] = np.roll(moved["offset"], 1)
        return original(self, moved)

    with mock.patch.object(KvRegions, "pack_lent", pack):
        yield


QUICK = {"loan_that_never_ends", "lent_blocks_in_another_order"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in MUTANTS]
)
def test_a_planted_bug_is_caught(name, answers):
    caught = MUTANTS.caught_by(name, lambda seed: run_lending_trial(seed, answers), SEEDS)
    assert caught is not None, f"{name} went through"
