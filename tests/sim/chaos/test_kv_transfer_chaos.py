"""Seeded faults on prefill, decode and aggregated workers, and changes of their roles: answers are exact, and afterwards nothing is held by anybody.

Engines check each read of KV; transfers take their time and copy at its end, whatever the memory holds by then.
"""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest

from penstock.core.errors import (
    PinExpired,
    RequestError,
    Unavailable,
)
from penstock.core.hashing import block_hashes
from penstock.core.types.instances import InstanceState, Role
from penstock.core.types.kv import KvLayout
from penstock.core.wire import unpack_tokens
from penstock.engine.batched import BatchedEngine
from penstock.engine.scheduling.prefixes import PartialBlocks
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.transfer.requests.handles import TransferHandle
from penstock.worker.config import KvTransferConfig, WorkerConfig
from penstock.worker.engine_driver import EngineDriver
from penstock.worker.kv_transfer.exports import KvExports
from penstock.worker.kv_transfer.incoming import BlockReservations, IncomingTransfers
from penstock.worker.kv_transfer.kv_transfer import KvTransfer
from penstock.worker.kv_transfer.reader import Reader
from penstock.worker.worker import Worker
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
    tiny_laid_out_engine,
    tiny_request,
)

pytestmark = pytest.mark.slow

CLIENTS = 30
CLIENTS_OF_THE_DYING = 6
FAULTS = 6
LAST_S = 2.0
QUIET_S = 40.0
LATE_S = 0.3
MAX_TOKENS = 30
PROMPTS = [(length, seed) for length in (3, 17, 40, 84) for seed in range(1, 7)]
ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE, "a0": Role.AGGREGATED}
KV_BLOCKS = {"p0": 26, "p1": 56, "d0": 56, "d1": 56, "a0": 56}
"""So few that what is not held is soon another prompt's."""
MODEL = KvLayout(
    num_layers=2, num_kv_heads=2, head_dim=4, dtype="float16", element_bytes=2, block_size=BLOCK_SIZE
)
LAYOUTS = {
    name: MODEL.split(num_blocks=1, **split)
    for name, split in zip(
        ROLES,
        (
            {},
            {"tp": 2},
            {"pp": 2},
            {"tp": 2, "order": "layer kv | block head token"},
            {"order": "layer | kv block token head"},
        ),
        strict=True,
    )
}
POLICIES = ("least-loaded", "round-robin", "kv", "session")


_make = KvExports.make


def arriving_late(self, *args):
    """Give handles that have been on their way for so long that they end before their readers know."""
    handle = _make(self, *args)
    return None if handle is None else msgspec.structs.replace(handle, ttl_s=handle.ttl_s + LATE_S)


@pytest.fixture(scope="module")
def answers():
    return references(PROMPTS, MAX_TOKENS)


def as_virtual_time_has_it(_engine, new_tokens, _cached_tokens):
    return TIMING.prefill_s_per_token * new_tokens


class KvTransferTrial:
    """One deployment, its clients and its faults."""

    def __init__(self, rng, answers):
        self.outcomes = Counter()
        self.rng = rng
        self.answers = answers
        self.cluster = MemoryCluster(rng.getrandbits(32), lease_ttl_s=1.0)
        self.is_late = rng.random() < 0.4  # reads take longer than what they read is held
        self.config = WorkerConfig(
            drain_timeout_s=0.5,
            kv_events=rng.random() < 0.8,
            kv_transfer=KvTransferConfig(
                pin_ttl_s=0.04 if self.is_late else rng.choice((0.05, 0.2, 3.0)),
                pinned_share_max=0.9 if self.is_late else rng.choice((0.3, 0.9)),
                fetches_max=8,
                stream_kv=self.is_late or rng.choice((True, True, False)),
            ),
        )
        self.chunk_tokens = rng.choice((8, 24) if self.is_late else (8, 24, 64))
        self.slowest_s = 0.5 if self.is_late else rng.choice((0.0, 0.1, 0.4))
        self.is_silent = (
            rng.random() < 0.5
        )  # who leaves or dies says nothing of it to whoever holds blocks for him
        self.is_laid_out = rng.random() < 0.25  # each worker keeps its KV in another way
        self.hurt = set()
        self.ended = Counter()  # what workers that are gone had done

    async def run(self):
        rng = self.rng
        async with AsyncExitStack() as stack:
            stack.enter_context(mock.patch.object(KvExports, "make", arriving_late))
            stack.enter_context(mock.patch.object(BatchedEngine, "_compute_s", as_virtual_time_has_it))
            if self.is_silent:
                stack.enter_context(mock.patch.object(EngineDriver, "forget"))
                stack.enter_context(mock.patch.object(KvTransfer, "_release"))
            await stack.enter_async_context(self.cluster)
            for name in ROLES:
                await self.start(name)
            router = RouterConfig(
                policy=rng.choice(POLICIES), disagg=DisaggConfig(remote_tokens_min=1), no_worker_wait_s=3.0
            )
            dispatchers = [await stack.enter_async_context(self.cluster.dispatcher(router)) for _ in range(2)]
            for dispatcher in dispatchers:
                await dispatcher.looked()
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(self.client(number, rng.choice(dispatchers), rng.uniform(0, LAST_S)))
                for _ in range(FAULTS):
                    group.create_task(self.fault(rng.uniform(0, LAST_S)))
                    group.create_task(self.cut_between_workers(rng.uniform(0, LAST_S)))
                for dispatcher in dispatchers:
                    group.create_task(self.change(dispatcher, rng.uniform(0, LAST_S)))
                group.create_task(self.frontend_that_dies(router, rng.uniform(0.1, LAST_S)))
            await asyncio.sleep(QUIET_S)
            for name in self.cluster.names:
                check_nothing_is_held(self.cluster.worker(name), self.cluster.engine(name))
                self.check_contents(name)
                self.note(name)
                assert self.cluster.worker(name).instance.state is InstanceState.READY
                frontends = len(self.cluster.worker(name)._frontends.all)
                assert frontends == len(self.cluster.links(name)), f"{name}: who is gone is still a frontend"
            for dispatcher in dispatchers:
                dispatcher.check()
        self.outcomes += self.ended
        return self.outcomes

    async def start(self, name):
        rng = random.Random(self.rng.getrandbits(32))
        await self.cluster.start(
            name,
            self.engine(name),
            role=ROLES[name],
            config=self.config,
            prices=PRICES,
            transport=SlowTransport(lambda _: rng.uniform(0, self.slowest_s)),
        )

    def engine(self, name):
        if self.is_laid_out:
            return tiny_laid_out_engine(LAYOUTS[name], KV_BLOCKS[name], chunk_tokens=self.chunk_tokens)
        return tiny_engine(KV_BLOCKS[name], chunk_tokens=self.chunk_tokens)

    async def client(self, number, dispatcher, at_s):
        rng = random.Random(self.rng.getrandbits(32))
        await asyncio.sleep(at_s)
        prompt = rng.choice(PROMPTS)
        tokens = rng.choice((1, 2, 12, MAX_TOKENS))
        request = msgspec.structs.replace(
            tiny_request(f"r{number}", prompt[0], tokens, seed=prompt[1]),
            session=rng.choice((None, "s", "t")),
            deadline_s=rng.uniform(0.05, 1.0) if rng.random() < 0.15 else None,
        )
        leaves_s = rng.uniform(0.0, 0.6) if rng.random() < 0.3 else None
        pause_s = rng.choice((0.0, 0.0, 0.1))
        expected = self.answers[prompt][:tokens]
        outcome = await read_and_compare(dispatcher, request, expected, leaves_s=leaves_s, pause_s=pause_s)
        self.outcomes[outcome] += 1

    async def fault(self, at_s):
        rng = random.Random(self.rng.getrandbits(32))
        await asyncio.sleep(at_s)
        if rng.random() < 0.3:
            rng.choice(self.links()).break_off("it was cut", tell_service=True)
            self.outcomes["cut"] += 1
            return
        alive = [name for name in ROLES if name not in self.hurt]
        if len(alive) < 3:
            return
        name = rng.choice(alive)
        self.hurt.add(name)
        self.note(name)
        if rng.random() < 0.7:
            self.cluster.kill(name)
        else:
            self.cluster.worker(name).stop()
            await asyncio.sleep(1.0)  # longer than it drains
            assert name not in self.cluster.names
        await asyncio.sleep(rng.uniform(0, 0.5))
        await self.start(name)
        self.hurt.discard(name)

    def links(self):
        return [link for name in self.cluster.names for link in self.cluster.links(name)]

    async def frontend_that_dies(self, router, at_s):
        """Have one more frontend, with clients of its own, be gone from one moment to the next: workers hear that it is, and no more of it."""
        async with self.cluster.dispatcher(router) as dispatcher:
            await dispatcher.looked()
            clients = [
                asyncio.ensure_future(self.client(number, dispatcher, self.rng.uniform(0, at_s)))
                for number in range(CLIENTS, CLIENTS + CLIENTS_OF_THE_DYING)
            ]
            await asyncio.sleep(at_s)
            self.outcomes["lost with their frontend"] += len(dispatcher._shared.requests)
            for link in self.links():
                if link.sink._connector is dispatcher._shared.fleet._connector:
                    link.hang_up(tell_service=True)
            for client in clients:
                client.cancel()
            for ended in await asyncio.gather(*clients, return_exceptions=True):
                if ended is not None and not isinstance(ended, asyncio.CancelledError):
                    raise ended

    async def cut_between_workers(self, at_s):
        rng = random.Random(self.rng.getrandbits(32))
        await asyncio.sleep(at_s)
        self.outcomes["cut between workers"] += cut_between_workers(self.cluster, rng)

    async def change(self, dispatcher, at_s):
        """Have somebody become one of another role, if that can be."""
        rng = random.Random(self.rng.getrandbits(32))
        await asyncio.sleep(at_s)
        try:
            async with asyncio.timeout(5):
                await dispatcher.change_role(rng.choice(list(ROLES)), rng.choice(list(Role)))
        except (RequestError, Unavailable) as error:
            self.outcomes[f"not changed: {error.code}"] += 1
        else:
            self.outcomes["changed"] += 1

    def note(self, name):
        assert not self.cluster.engine(name).load().failed_steps, f"{name}: read KV of another prefix"
        kv_transfer = self.cluster.worker(name).kv_transfer
        self.ended["fetched"] += kv_transfer.incoming.fetched_blocks
        self.ended["prefetched"] += kv_transfer.incoming.early_blocks
        for code, times in kv_transfer.incoming.failures.items():
            self.ended[code] += times

    def check_contents(self, name):
        """Raise AssertionError where a block is not what its name says, read or not."""
        engine = self.cluster.engine(name)
        kv = engine._runner._kv
        for length, seed in PROMPTS:
            request = tiny_request("", length, seed=seed)
            ids = unpack_tokens(request.token_ids)
            block_ids = engine.pool.match(block_hashes(request.token_ids, BLOCK_SIZE))
            if self.is_laid_out:
                assert engine._runner._laid_out.holds(ids, block_ids), f"{name}: a block of another prefix"
                continue
            digests = np.cumsum(kv._terms(ids, np.arange(length)))
            cells = kv._cells[block_ids].ravel()
            assert (cells == digests[: len(cells)]).all(), f"{name}: a block of another prefix"


def run_kv_transfer_trial(seed, answers):
    return run_trial(lambda rng: KvTransferTrial(rng, answers).run(), seed)


SEEDS = range(48)


@pytest.mark.parametrize("seeds", [SEEDS[:12], pytest.param(SEEDS, marks=pytest.mark.nightly)], ids=len)
def test_answers_are_exact_and_nothing_is_left(answers, seeds):
    outcomes = run_trials(lambda seed: run_kv_transfer_trial(seed, answers), seeds)
    assert outcomes["length"] > CLIENTS * len(seeds) / 2
    assert outcomes["unavailable"] + outcomes["overloaded"] < CLIENTS * len(seeds) / 20
    kinds = (
        "left",
        "deadline_exceeded",
        "pin_expired",
        "peer_lost",
        "fetched",
        "prefetched",
        "changed",
        "cut",
        "lost with their frontend",
    )
    for kind in (*kinds, "cut between workers"):
        assert outcomes[kind] > len(seeds) / 5, f"{kind}: {outcomes}"


MUTANTS = Mutants()
mutant = MUTANTS.plant


@contextmanager
def reading_otherwise(changes):
    """Have each piece read as if other things were known of its pin."""
    original = IncomingTransfers._load

    async def load(self, one, held):
        known = one.peer.growth
        one.peer.growth = replace(known, **changes(known))
        try:
            await original(self, one, held)
        finally:
            one.peer.growth = known

    with mock.patch.object(IncomingTransfers, "_load", load):
        yield


@mutant
def published_without_asking():
    """What was read counts, whatever its prefill worker says."""

    async def always(_self, _peer, _answer):
        return True

    with mock.patch.object(Reader, "_or_lost", always):
        yield


@mutant
def unpinned_before_the_read():
    """A prefill worker lets blocks go at once, and says that it held them."""
    original = _make

    def make(self, *args):
        handle = original(self, *args)
        if handle is not None:
            export = self._held[handle.pin_id]
            self._engine.unpin(export.block_ids)
            self._held_blocks -= export.num_counted
            export.num_counted = 0
            export.num_told = 0
            export.block_ids.clear()
        return handle

    with mock.patch.dict(globals(), _make=make):
        yield


@mutant
def pin_without_expiry():
    """What nobody fetches stays held."""
    with mock.patch.object(KvExports, "_expire"):
        yield


@mutant
def frontend_that_is_missed_by_nobody():
    """What a frontend that is gone had asked for stays its own."""
    with mock.patch.object(Worker, "disconnected"):
        yield


@mutant
def prefix_that_stays_held():
    """A fetch forgets to let go of what was there already."""
    original = BlockReservations.hold

    async def hold(self, hashes):
        held, reserved = await original(self, hashes)
        self._engine.pin(hashes[: len(held)])
        return held, reserved

    with mock.patch.object(BlockReservations, "hold", hold):
        yield


@mutant
def memory_given_back_during_a_transfer():
    """Who gives a fetch up does not wait until its bytes have stopped arriving."""
    with mock.patch.object(TransferHandle, "complete", TransferHandle.wait):
        yield


@mutant
def piece_that_counts_without_confirmation():
    """What was read is published, although its prefill worker says that it was not pinned all the time."""
    original = Reader.read

    async def read(self, *args):
        with suppress(PinExpired):
            await original(self, *args)

    with mock.patch.object(Reader, "read", read):
        yield


@mutant
def prefill_worker_that_says_yes():
    """A prefill worker says of any pin that it is held."""
    with mock.patch.object(KvExports, "holds", return_value=True):
        yield


@mutant
def abandoned_prefetch_that_keeps_its_room():
    """Who is given up forgets the blocks that nothing has come for."""
    original = IncomingTransfers._end

    def end(self, one):
        if one.held is not None:
            here, reserved = one.held
            one.held = here, reserved[: one.num_read]
        original(self, one)

    with mock.patch.object(IncomingTransfers, "_end", end):
        yield


@mutant
def piece_under_the_name_of_the_next():
    """A piece of a prompt is read from where the next one begins."""
    with reading_otherwise(lambda known: {"block_ids": np.roll(known.block_ids, 1)}):
        yield


@mutant
def partial_block_that_is_claimed_and_released():
    """An engine lets the block with a prompt's last tokens go although somebody has claimed it."""
    with mock.patch.object(PartialBlocks, "claim", lambda self, request_id: self._kept.get(request_id)):
        yield


@mutant
def tail_of_another_block():
    """The last tokens of a prompt are read from where those before them lie."""
    with reading_otherwise(lambda known: {"tail": known.block_ids[-1:]} if len(known.tail) else {}):
        yield


@mutant
def tail_that_is_not_read():
    """The last tokens of a prompt are taken to be there, and were not fetched."""
    incoming, reader = IncomingTransfers._load, Reader.read
    has_tail = ContextVar("has_tail", default=False)

    async def piece(self, one, held):
        has_tail.set(bool(len(one.peer.growth.tail)) and self._partial_blocks is not None)
        await incoming(self, one, held)

    async def without_the_tail(self, origin, pin_id, targets, sources):
        end = -1 if has_tail.get() and len(targets) > 1 else None
        await reader(self, origin, pin_id, targets[:end], sources[:end])

    with (
        mock.patch.object(IncomingTransfers, "_load", piece),
        mock.patch.object(Reader, "read", without_the_tail),
    ):
        yield


QUICK = {"published_without_asking", "pin_without_expiry", "tail_that_is_not_read"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in MUTANTS]
)
def test_a_planted_bug_is_caught(name, answers):
    caught = MUTANTS.caught_by(name, lambda seed: run_kv_transfer_trial(seed, answers), SEEDS)
    assert caught is not None, f"{name} went through"
