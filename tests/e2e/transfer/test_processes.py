"""Agents of two real processes: one that is killed or stopped is an error, which heartbeats alone tell of a stopped one."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import PenstockError
from penstock.transfer import Descriptors, Peer, PeerLost, TransferAgent, TransferConfig, TransferOp
from penstock.transfer.default_transports import default_transports

NEVER_S = 3600.0
"""A heartbeat's timeout that tells nothing within a test."""
SIZE_BYTES = 64 << 20
LISTEN = {"unix": "unix", "tcp": "tcp://127.0.0.1:0"}
ALL_BUT_NIXL = tuple(made.name for made in default_transports(TransferConfig()) if made.name != "nixl")
LINKS = pytest.mark.parametrize("link", ["unix", pytest.param("tcp", marks=pytest.mark.nightly)])

pytestmark = pytest.mark.slow


@asynccontextmanager
async def pair(
    link: str, *transport_names: str, heartbeat_timeout_s: float = NEVER_S
) -> AsyncIterator[tuple[TransferAgent, Peer, int]]:
    """Give an agent here, its peer in a process of its own, connected over this kind of link, and that process."""
    config = TransferConfig(
        listen=(LISTEN[link],),
        heartbeat_timeout_s=heartbeat_timeout_s,
        transports=transport_names or ALL_BUT_NIXL,
    )
    script = str(Path(__file__).parents[1] / "helpers" / "transfer_owner.py")
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, script, config.model_dump_json(), str(SIZE_BYTES)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        metadata = bytes.fromhex((await owner.stdout.readline()).decode())
        async with TransferAgent("reader", config) as agent:
            yield agent, await agent.connect(metadata), owner.pid
    finally:
        with suppress(ProcessLookupError):  # a test that killed it may have had it reaped already
            owner.kill()
        await owner.wait()


async def lost(agent: TransferAgent, peer: Peer) -> PenstockError:
    """Wait until the agent says that the peer is gone, as whoever asks it would see."""
    while True:
        try:
            agent.estimate(TransferOp.READ, 1, 1, peer)
        except PeerLost as error:
            return error
        await asyncio.sleep(0.002)


@LINKS
async def test_an_idle_peer_that_is_killed_is_lost_without_a_heartbeat(link: str) -> None:
    async with pair(link) as (agent, peer, pid):
        os.kill(pid, signal.SIGKILL)
        assert "agent owner is gone" in (await lost(agent, peer)).message
        assert agent.counters.lost_peers == 1
        with pytest.raises(PeerLost):
            agent.prepare(Descriptors.joined([]), Descriptors.joined([]), peer)


@pytest.mark.parametrize(
    ("link", "transport", "op"),
    [
        ("unix", "shm", TransferOp.READ),
        ("tcp", "tcp", TransferOp.WRITE),
        pytest.param("unix", "shm", TransferOp.WRITE, marks=pytest.mark.nightly),
        pytest.param("tcp", "tcp", TransferOp.READ, marks=pytest.mark.nightly),
        pytest.param("unix", "tcp", TransferOp.READ, marks=pytest.mark.nightly),
        pytest.param("unix", "tcp", TransferOp.WRITE, marks=pytest.mark.nightly),
    ],
)
async def test_a_peer_that_is_killed_mid_transfer_is_an_error_without_a_heartbeat(
    link: str, transport: str, op: TransferOp
) -> None:
    """Transfers are posted without a pause, so that the peer dies during one, and the next one is refused."""
    async with pair(link, transport) as (agent, peer, pid):
        here = agent.register(np.zeros(SIZE_BYTES, np.uint8))
        prepared = agent.prepare(here.ranges(), peer.region("shared").ranges(), peer)

        async def post_for_ever() -> None:
            await prepared.post(op).wait()
            asyncio.get_running_loop().call_later(0.1, os.kill, pid, signal.SIGKILL)
            while True:
                await prepared.post(op).wait()

        with pytest.raises(PeerLost, match="agent owner is gone"):
            await post_for_ever()
        assert agent.transfers_under_way == 0
        await agent.deregister(here)


@LINKS
async def test_a_peer_that_stops_is_lost_by_its_heartbeats(link: str) -> None:
    async with pair(link, heartbeat_timeout_s=0.5) as (agent, peer, pid):
        os.kill(pid, signal.SIGSTOP)
        assert "agent owner is gone" in (await lost(agent, peer)).message


async def test_a_peer_that_stops_in_a_transfer_is_lost_by_its_heartbeats() -> None:
    """What the peer's process has to do itself does not wait for it any longer."""
    async with pair("tcp", "tcp", heartbeat_timeout_s=0.5) as (agent, peer, pid):
        here = agent.register(np.zeros(SIZE_BYTES, np.uint8))
        os.kill(pid, signal.SIGSTOP)
        read = agent.post(TransferOp.READ, here.ranges(), peer.region("shared").ranges(), peer)
        with pytest.raises(PeerLost, match="agent owner is gone"):
            await read.wait()
