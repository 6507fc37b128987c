"""Agents of two real processes: one that is killed or stopped is an error in time, and two idle ones use next to nothing."""

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import PenstockError
from penstock.transfer import (
    Descriptors,
    Peer,
    PeerLost,
    TransferAgent,
    TransferConfig,
    TransferOp,
)
from penstock.transfer.default_transports import default_transports

LOST_WITHIN_S = 0.2
HEARTBEAT_TIMEOUT_S = 1.0
IDLE_S = 4.0
IDLE_TRIES = 3
IDLE_SHARE_MAX = 0.005
SIZE_BYTES = 64 << 20
LISTEN = {"unix": "unix", "tcp": "tcp://127.0.0.1:0"}

pytestmark = [pytest.mark.slow, pytest.mark.alone]


_ALL_BUT_NIXL = tuple(made.name for made in default_transports(TransferConfig()) if made.name != "nixl")
"""NIXL's own idle figure is told in its documentation."""


@dataclass
class Pair:
    agent: TransferAgent
    peer: Peer
    pid: int

    def kill(self) -> Future[float]:
        """End the peer's process, and give when it had ended: on a busy machine the kernel takes its time to."""
        pidfd = os.pidfd_open(self.pid)

        def until_dead() -> float:
            try:
                select.select([pidfd], [], [])
                return time.perf_counter()
            finally:
                os.close(pidfd)

        dead = ThreadPoolExecutor(1).submit(until_dead)
        os.kill(self.pid, signal.SIGKILL)
        return dead

    async def until_lost(self) -> PenstockError:
        """Wait until the agent says that the peer is gone, as whoever asks it would see."""
        while True:
            try:
                self.agent.estimate(TransferOp.READ, 1, 1, self.peer)
            except PeerLost as error:
                return error
            await asyncio.sleep(0.002)


@asynccontextmanager
async def pair(link: str, *transport_names: str) -> AsyncIterator[Pair]:
    """An agent here and one in a process of its own, connected over this kind of link; all transports but nixl, or these."""
    config = _config(link, *transport_names)
    async with _process("transfer_owner.py", config.model_dump_json(), str(SIZE_BYTES)) as owner:
        metadata = bytes.fromhex(await _line(owner))
        async with TransferAgent("reader", config) as agent:
            yield Pair(agent, await agent.connect(metadata), owner.pid)


def _config(link: str, *transport_names: str) -> TransferConfig:
    return TransferConfig(
        listen=(LISTEN[link],),
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        transports=transport_names or _ALL_BUT_NIXL,
    )


@asynccontextmanager
async def _process(script: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a script of this folder, and kill it at the end."""
    path = str(Path(__file__).parents[1] / "helpers" / script)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, path, *arguments, stdin=pipe, stdout=pipe)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):  # a test that killed it may have had it reaped already
            child.kill()
        await child.wait()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("link", LISTEN)
async def test_an_idle_peer_that_is_killed_is_lost_at_once(link: str) -> None:
    async with pair(link) as two:
        await asyncio.sleep(0.1)
        dead = two.kill()
        async with asyncio.timeout(10):
            error = await two.until_lost()
            lost_s = time.perf_counter()
            assert lost_s - await asyncio.wrap_future(dead) < LOST_WITHIN_S
        assert "agent owner is gone" in error.message
        assert two.agent.counters.lost_peers == 1
        with pytest.raises(PeerLost):
            two.agent.prepare(Descriptors.joined([]), Descriptors.joined([]), two.peer)


@pytest.mark.parametrize("op", TransferOp)
@pytest.mark.parametrize(("link", "transport"), [("unix", "shm"), ("unix", "tcp"), ("tcp", "tcp")])
async def test_a_peer_that_is_killed_mid_transfer_is_an_error_at_once(
    link: str, transport: str, op: TransferOp
) -> None:
    """Transfers are posted without a pause, so that the peer dies during one, and the next one is refused."""

    async with pair(link, transport) as two:
        here = two.agent.register(np.zeros(SIZE_BYTES, np.uint8))
        prepared = two.agent.prepare(here.ranges(), two.peer.region("shared").ranges(), two.peer)
        await prepared.post(op).wait()  # the first touch of memory may take a while
        done = 0
        dead: list[Future[float]] = []

        async def post_for_ever() -> None:
            nonlocal done
            while True:
                await prepared.post(op).wait()
                done += 1

        asyncio.get_running_loop().call_later(0.3, lambda: dead.append(two.kill()))
        with pytest.raises(PeerLost, match="agent owner is gone"):
            await asyncio.wait_for(post_for_ever(), 10)
        lost_s = time.perf_counter()
        assert lost_s - await asyncio.wrap_future(dead[0]) < LOST_WITHIN_S
        assert done > 0
        assert two.agent.transfers_under_way == 0
        await two.agent.deregister(here)


@pytest.mark.parametrize("link", LISTEN)
async def test_a_peer_that_stops_is_lost_within_the_heartbeats_timeout(link: str) -> None:
    async with pair(link) as two:
        await asyncio.sleep(0.1)
        stopped_s = time.perf_counter()
        os.kill(two.pid, signal.SIGSTOP)
        async with asyncio.timeout(10):
            error = await two.until_lost()
        assert time.perf_counter() - stopped_s < HEARTBEAT_TIMEOUT_S + LOST_WITHIN_S
        assert "agent owner is gone" in error.message


async def test_a_peer_that_stops_in_a_transfer_is_lost_within_the_heartbeats_timeout() -> None:
    """What the peer's process has to do itself does not wait for it any longer."""

    async with pair("tcp", "tcp") as two:
        here = two.agent.register(np.zeros(SIZE_BYTES, np.uint8))
        os.kill(two.pid, signal.SIGSTOP)
        stopped_s = time.perf_counter()
        read = two.agent.post(TransferOp.READ, here.ranges(), two.peer.region("shared").ranges(), two.peer)
        async with asyncio.timeout(10):
            with pytest.raises(PeerLost, match="agent owner is gone"):
                await read.wait()
        assert time.perf_counter() - stopped_s < HEARTBEAT_TIMEOUT_S + LOST_WITHIN_S


@pytest.mark.parametrize("link", LISTEN)
async def test_idle_agents_use_next_to_no_cpu(link: str) -> None:
    """Both run in processes of their own, so that nothing of other tests counts."""

    async with asyncio.timeout(120):
        shares: list[list[float]] = []
        while len(shares) < IDLE_TRIES and (not shares or max(shares[-1]) >= IDLE_SHARE_MAX):
            if (measured := await _idle_shares(link)) is not None:
                shares.append(measured)
    assert max(shares[-1]) < IDLE_SHARE_MAX, f"{shares} of a core"


async def _idle_shares(link: str) -> list[float] | None:
    """Measure the share of a core that the owner and the reader use; None if the machine was so busy that they lost each other."""
    config = _config(link)
    async with (
        _process("transfer_owner.py", config.model_dump_json(), str(SIZE_BYTES)) as owner,
        _process("transfer_idle.py", config.model_dump_json(), await _line(owner), str(SIZE_BYTES)) as reader,
    ):
        if await _line(reader) != "idle":
            return None
        before_s = [_cpu_s(process.pid) for process in (owner, reader)]
        await asyncio.sleep(IDLE_S)
        after_s = [_cpu_s(process.pid) for process in (owner, reader)]
        assert reader.stdin is not None
        reader.stdin.write(b"\n")
        if await _line(reader) != "connected":
            return None
        return [(after - before) / IDLE_S for before, after in zip(before_s, after_s, strict=True)]


def _cpu_s(pid: int) -> float:
    """Read the CPU clock of another process: clock_getcpuclockid(3) makes its id from the process's."""
    return time.clock_gettime((~pid << 3) | 2)
