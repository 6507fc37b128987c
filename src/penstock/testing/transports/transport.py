"""The conformance suite of all transports, including those to an agent's own storage. Subclass it and make a harness.

`penstock.testing.peer_transport` has the tests of transports between two agents.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from penstock.core.descriptors import Descriptors
from penstock.core.errors import (
    DeadlineExceeded,
    TransferCancelled,
    TransferError,
    TransferRefused,
)
from penstock.testing.loop import run_async
from penstock.testing.transports.harness import TransportHarness, differ, fill
from penstock.transfer import TransferHandle, TransferOp, TransferState

READ, WRITE = TransferOp.READ, TransferOp.WRITE

Scenario = Callable[[TransportHarness], Awaitable[None]]


class TransportSuite:
    """Tests that bytes arrive, in both directions, in ranges of any kind."""

    size_bytes: ClassVar[int] = 1 << 20
    large_bytes: ClassVar[int] = 48 << 20
    """Large enough that a transfer is still running when a test interrupts it."""

    @staticmethod
    def harness(size_bytes: int) -> TransportHarness:
        """Make the transport's harness, with `size_bytes` of memory on each side."""
        raise NotImplementedError

    def run(self, scenario: Scenario, size_bytes: int | None = None) -> None:
        async def main() -> None:
            async with self.harness(size_bytes or self.size_bytes) as harness:
                await scenario(harness)
                assert harness.agent.transfers_under_way == 0, "a transfer was left"

        run_async(main())

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_all_of_a_region(self, op: TransferOp) -> None:
        async def scenario(harness: TransportHarness) -> None:
            here, there = await fill(harness, seed=1)
            handle = harness.agent.post(op, harness.local.ranges(), harness.remote.ranges(), harness.peer)
            await handle.wait()
            moved = there if op is READ else here
            assert np.array_equal(harness.read_local(), moved)
            assert np.array_equal(await harness.read_remote(), moved)
            assert handle.state is TransferState.DONE

        self.run(scenario)

    @pytest.mark.parametrize("op", [READ, WRITE])
    @pytest.mark.parametrize("seed", range(4))
    def test_scattered_ranges_of_any_length(self, op: TransferOp, seed: int) -> None:
        async def scenario(harness: TransportHarness) -> None:
            here, there = await fill(harness, seed)
            local, remote = _scattered(Random(seed), len(here), 300)
            await _post(harness, op, local, remote)
            target, source = (here, there) if op is READ else (there, here)
            pairs = zip(*((local, remote) if op is READ else (remote, local)), strict=True)
            for (to, length), (at, _) in pairs:
                target[to : to + length] = source[at : at + length]
            assert np.array_equal(harness.read_local(), here)
            assert np.array_equal(await harness.read_remote(), there)

        self.run(scenario)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_thousands_of_blocks_in_any_order(self, op: TransferOp) -> None:
        async def scenario(harness: TransportHarness) -> None:
            here, there = await fill(harness, seed=3)
            block_bytes = len(here) // 2048
            order = np.random.default_rng(3).permutation(2048)
            local = harness.local.blocks(np.arange(2048), block_bytes)
            handle = harness.agent.post(op, local, harness.remote.blocks(order, block_bytes), harness.peer)
            await handle.wait()
            if op is READ:
                expected = there.reshape(2048, -1)[order].reshape(-1)
                assert np.array_equal(harness.read_local(), expected)
            else:
                expected = np.empty_like(there)
                expected.reshape(2048, -1)[order] = here.reshape(2048, -1)
                assert np.array_equal(await harness.read_remote(), expected)
            assert handle.telemetry.ranges == 2048
            assert handle.telemetry.num_bytes == len(here)

        self.run(scenario)

    def test_an_empty_transfer_is_done_at_once(self) -> None:
        async def scenario(harness: TransportHarness) -> None:
            here, there = await fill(harness, seed=4)
            await _post(harness, WRITE, [], [])
            await _post(harness, READ, [(5, 0), (9, 0)], [(0, 0), (len(there), 0)])
            assert np.array_equal(harness.read_local(), here)
            assert np.array_equal(await harness.read_remote(), there)

        self.run(scenario)

    def test_a_prepared_list_can_be_posted_repeatedly_in_both_directions(self) -> None:
        async def scenario(harness: TransportHarness) -> None:
            here, _ = await fill(harness, seed=5)
            prepared = harness.agent.prepare(
                harness.local.ranges([0, 70_000], 8192),
                harness.remote.ranges([300_000, 8], 8192),
                harness.peer,
            )
            for turn in range(5):
                here[:] = turn + 1
                harness.write_local(here)
                await prepared.post(WRITE).wait()
                harness.write_local(np.zeros_like(here))
                await prepared.post(READ).wait()
                found = harness.read_local()
                assert (found[:8192] == turn + 1).all()
                assert (found[70_000 : 70_000 + 8192] == turn + 1).all()
                assert not found[8192:70_000].any()

        self.run(scenario)

    def test_many_transfers_at_once(self) -> None:
        async def scenario(harness: TransportHarness) -> None:
            here, there = await fill(harness, seed=6)
            part = len(here) // 32
            handles: list[TransferHandle] = []
            for index in range(32):
                op = READ if index % 2 else WRITE
                ranges = harness.local.ranges(index * part, part), harness.remote.ranges(index * part, part)
                handles.append(harness.agent.post(op, *ranges, harness.peer))
            for handle in handles:
                await handle.wait()
            for index in range(32):
                own = slice(index * part, (index + 1) * part)
                if index % 2:
                    here[own] = there[own]
                else:
                    there[own] = here[own]
            assert np.array_equal(harness.read_local(), here)
            assert np.array_equal(await harness.read_remote(), there)

        self.run(scenario)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_checksums_accept_intact_bytes(self, op: TransferOp) -> None:
        async def scenario(harness: TransportHarness) -> None:
            await fill(harness, seed=7)
            whole = harness.local.ranges(), harness.remote.ranges()
            await harness.agent.post(WRITE, *whole, harness.peer, checksum=True).wait()
            await harness.agent.post(op, *whole, harness.peer, checksum=True).wait()
            assert np.array_equal(harness.read_local(), await harness.read_remote())

        self.run(scenario)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_a_range_outside_of_the_region_is_refused_and_nothing_moves(self, op: TransferOp) -> None:
        async def scenario(harness: TransportHarness) -> None:
            here, there = await fill(harness, seed=8)
            size = len(here)
            local, remote = harness.local, harness.remote
            wrong = [
                (local.ranges(0, 8), remote.ranges(size - 7, 8)),
                (local.ranges(size - 7, 8), remote.ranges(0, 8)),
                (local.ranges(0, 8), remote.ranges(2**64 - 4, 8)),
                (local.ranges(0, 8), remote.ranges([0], [9])),
                (local.ranges([0, 8], 8), remote.ranges(0, 8)),
                (Descriptors.of(10**6, 0, 8), remote.ranges(0, 8)),
                (local.ranges(0, 8), Descriptors.of(10**6, 0, 8)),
            ]
            for ours, theirs in wrong:
                with pytest.raises(TransferRefused):
                    harness.agent.post(op, ours, theirs, harness.peer)
            assert np.array_equal(harness.read_local(), here)
            assert np.array_equal(await harness.read_remote(), there)

        self.run(scenario)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_a_cancelled_transfer_releases_memory(self, op: TransferOp) -> None:
        async def scenario(harness: TransportHarness) -> None:
            await differ(harness)
            whole = harness.local.ranges(), harness.remote.ranges()
            handle = harness.agent.post(op, *whole, harness.peer)
            await asyncio.sleep(0)
            handle.cancel()
            handle.cancel()
            with pytest.raises(TransferCancelled):
                await handle.wait()
            assert handle.state is TransferState.CANCELLED
            here, there = harness.read_local(), await harness.read_remote()
            await asyncio.sleep(0.05)
            assert np.array_equal(harness.read_local(), here), "bytes arrived after the end"
            assert np.array_equal(await harness.read_remote(), there), "bytes arrived after the end"
            await harness.agent.post(WRITE, *whole, harness.peer).wait()
            assert np.array_equal(harness.read_local(), await harness.read_remote())

        self.run(scenario, self.large_bytes)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_a_deadline_ends_a_transfer(self, op: TransferOp) -> None:
        async def scenario(harness: TransportHarness) -> None:
            whole = harness.local.ranges(), harness.remote.ranges()
            handle = harness.agent.post(op, *whole, harness.peer, timeout_s=1e-9)
            with pytest.raises(DeadlineExceeded, match="not done within"):
                await handle.wait()
            assert handle.state is TransferState.FAILED
            await harness.agent.post(op, *whole, harness.peer).wait()
            assert np.array_equal(harness.read_local(), await harness.read_remote())

        self.run(scenario, self.large_bytes)

    @pytest.mark.parametrize("op", [READ, WRITE])
    def test_deregistering_ends_transfers_of_the_region(self, op: TransferOp) -> None:
        async def scenario(harness: TransportHarness) -> None:
            whole = harness.local.ranges(), harness.remote.ranges()
            prepared = harness.agent.prepare(*whole, harness.peer)
            handle = prepared.post(op)
            await asyncio.sleep(0)
            await harness.agent.deregister(harness.local)
            with pytest.raises(TransferRefused, match="deregistered"):
                await handle.wait()
            with pytest.raises(TransferRefused, match="not registered"):
                prepared.post(op)
            with pytest.raises(TransferRefused):
                await harness.agent.deregister(harness.local)

        self.run(scenario, self.large_bytes)

    def test_telemetry_has_the_chosen_transport_and_the_seconds(self) -> None:
        async def scenario(harness: TransportHarness) -> None:
            whole = harness.local.ranges(), harness.remote.ranges()
            before_s = harness.agent.estimate(WRITE, 1 << 20, 1, harness.peer)
            handle = harness.agent.post(WRITE, *whole, harness.peer)
            await handle.wait()
            assert handle.telemetry.backend in handle.telemetry.expected_s
            assert handle.telemetry.wire_s > 0
            assert handle.telemetry.backend in handle.telemetry.reason
            assert harness.agent.estimate(WRITE, 1 << 20, 1, harness.peer) != before_s
            assert harness.agent.counters.written_bytes == {handle.telemetry.backend: self.size_bytes}
            assert 0 < harness.agent.estimate(READ, 4096, 1, harness.peer) < 10

        self.run(scenario)

    def test_closing_ends_transfers_in_progress(self) -> None:
        async def scenario(harness: TransportHarness) -> None:
            handle = harness.agent.post(
                WRITE, harness.local.ranges(), harness.remote.ranges(), harness.peer, timeout_s=60
            )
            await asyncio.sleep(0)
            await harness.agent.close()
            with pytest.raises(TransferError):
                await handle.wait()

        self.run(scenario, self.large_bytes)


def _scattered(random: Random, size: int, count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Cut both sides into n ranges without overlap, of equal lengths in pairs; some ranges are adjacent."""
    lengths = [random.choice([1, 7, 64, 511, 512, 4096, size // count // 2]) for _ in range(count)]
    sides: list[list[tuple[int, int]]] = []
    for _ in range(2):
        spare = size - sum(lengths)
        order = list(range(count))
        random.shuffle(order)
        at = 0
        side = [(0, 0)] * count
        for index in order:
            gap = random.choice([0, 0, random.randint(0, spare // count)])
            side[index] = (at + gap, lengths[index])
            at += gap + lengths[index]
        sides.append(side)
    return sides[0], sides[1]


async def _post(
    harness: TransportHarness, op: TransferOp, local: list[tuple[int, int]], remote: list[tuple[int, int]]
) -> None:
    def ranges(region_id: int, side: list[tuple[int, int]]) -> Descriptors:
        return Descriptors.of(region_id, [at for at, _ in side], [length for _, length in side])

    ours, theirs = ranges(harness.local.region_id, local), ranges(harness.remote.region_id, remote)
    await harness.agent.post(op, ours, theirs, harness.peer).wait()
