"""Memory of which a transfer is stopped in the middle: it is free when `deregister` has returned, and not before."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.transfer import (
    Arena,
    MemoryInUse,
    PeerLost,
    Registration,
    TransferAgent,
    TransferConfig,
    TransferOp,
    TransferRefused,
)

SIZE_BYTES = 64 << 20
UNTOUCHED = 1
HEARTBEAT_TIMEOUT_S = 1.0
"""A busy machine may keep a process waiting for half a second."""
NEVER_S = 3600.0
FREE_WITHIN_S = 60.0
UCX_OVER_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
"""For one of two processes, so that NIXL sends between both: the kernel would copy from and to a stopped one."""
WRITERS = pytest.mark.parametrize(
    ("transport", "environment"),
    [
        pytest.param("shm", {}, id="shm"),
        pytest.param("nixl", {}, id="nixl", marks=pytest.mark.nightly),
        pytest.param("nixl", UCX_OVER_TCP, id="nixl-tcp", marks=pytest.mark.nightly),
    ],
)
pytestmark = pytest.mark.slow


@dataclass
class Scene:
    owner: TransferAgent
    arena: Arena
    given: Registration
    child: asyncio.subprocess.Process

    def stop_in_the_middle(self) -> None:
        os.kill(self.child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.child.pid, signal.SIGCONT)

    async def until_free(self) -> None:
        """Deregister until that works; how long the peer needs to hear of it is the machine's business."""
        async with asyncio.timeout(FREE_WITHIN_S):
            while True:
                try:
                    return await self.owner.deregister(self.given)
                except MemoryInUse:
                    continue

    async def expect_untouched(self) -> None:
        """Use the memory for something else, and see that nobody else does."""
        self.arena.array[:] = UNTOUCHED
        await asyncio.sleep(0.3)
        assert (self.arena.array == UNTOUCHED).all()


@asynccontextmanager
async def written(
    transport: str,
    listen: str = "unix",
    environment: Mapping[str, str] | None = None,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
) -> AsyncIterator[Scene]:
    """An agent here whose region is written by one in a process of its own, with more in its environment."""
    config = TransferConfig(
        listen=(listen,), heartbeat_timeout_s=heartbeat_timeout_s, transports=(transport,)
    )
    with Arena.create(SIZE_BYTES) as arena:
        async with TransferAgent("owner", config) as owner:
            given = owner.register(arena, "kv")
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                str(Path(__file__).parents[1] / "helpers" / "transfer_writer.py"),
                config.model_dump_json(),
                owner.metadata().hex(),
                env=os.environ | dict(environment or {}),
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                assert child.stdout is not None
                async with asyncio.timeout(60):
                    assert await child.stdout.readline() == b"writing\n"
                yield Scene(owner, arena, given, child)
            finally:
                with suppress(ProcessLookupError):
                    child.kill()
                await child.wait()


@WRITERS
async def test_memory_is_in_quarantine_while_a_stopped_writer_could_go_on(
    transport: str, environment: Mapping[str, str]
) -> None:
    async with written(transport, environment=environment) as scene:
        scene.stop_in_the_middle()
        with pytest.raises(MemoryInUse, match="agent writer, which neither answers nor ends"):
            await scene.owner.deregister(scene.given)
        assert scene.owner.quarantined == (scene.given,)
        with pytest.raises(MemoryInUse):
            await scene.owner.deregister(scene.given)
        scene.go_on()
        await scene.until_free()
        assert not scene.owner.quarantined
        with pytest.raises(TransferRefused, match="not registered"):
            await scene.owner.deregister(scene.given)
        await scene.expect_untouched()


@WRITERS
async def test_memory_is_free_when_the_stopped_writer_is_killed(
    transport: str, environment: Mapping[str, str]
) -> None:
    async with written(transport, environment=environment) as scene:
        scene.stop_in_the_middle()
        with pytest.raises(MemoryInUse):
            await scene.owner.deregister(scene.given)
        scene.child.kill()
        await scene.until_free()
        assert not scene.owner.quarantined
        await scene.expect_untouched()


async def test_a_writer_that_was_lost_before_may_still_write() -> None:
    async with written("shm") as scene:
        scene.stop_in_the_middle()
        await asyncio.sleep(
            3 * HEARTBEAT_TIMEOUT_S
        )  # its heartbeats are missed; were they not, the same holds
        with pytest.raises(MemoryInUse):
            await scene.owner.deregister(scene.given)
        scene.go_on()
        await scene.until_free()
        await scene.expect_untouched()


@pytest.mark.parametrize("listen", ["unix", pytest.param("tcp://127.0.0.1:0", marks=pytest.mark.nightly)])
async def test_what_only_the_owner_itself_receives_is_free_at_once(listen: str) -> None:
    async with written("tcp", listen) as scene:
        scene.stop_in_the_middle()
        await scene.owner.deregister(scene.given)
        scene.go_on()
        await scene.expect_untouched()


async def test_an_agent_that_closes_says_what_is_not_free() -> None:
    async with written("shm") as scene:
        scene.stop_in_the_middle()
        with pytest.raises(MemoryInUse, match="agent writer"):
            await scene.owner.close()
        scene.child.kill()


async def test_a_writer_that_answers_is_not_waited_for() -> None:
    """It would be waited for for an hour."""
    async with written("shm", heartbeat_timeout_s=NEVER_S) as scene:
        await scene.owner.deregister(scene.given)
        await scene.expect_untouched()
        await scene.owner.close()
        assert np.all(scene.arena.array == UNTOUCHED)


@pytest.mark.parametrize(
    ("op", "end"),
    [
        (TransferOp.READ, signal.SIGKILL),
        pytest.param(TransferOp.READ, signal.SIGCONT, marks=pytest.mark.nightly),
        pytest.param(TransferOp.WRITE, signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param(TransferOp.WRITE, signal.SIGCONT, marks=pytest.mark.nightly),
    ],
)
async def test_own_memory_is_in_quarantine_while_nixl_may_move_it_for_a_stopped_owner(
    op: TransferOp, end: signal.Signals
) -> None:
    config = TransferConfig(listen=("unix",), heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, transports=("nixl",))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parents[1] / "helpers" / "transfer_owner.py"),
        config.model_dump_json(),
        str(SIZE_BYTES),
        env=os.environ | UCX_OVER_TCP,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        metadata = bytes.fromhex((await child.stdout.readline()).decode())
        with Arena.create(SIZE_BYTES) as arena:
            async with TransferAgent("initiator", config) as agent:
                here = agent.register(arena)
                peer = await agent.connect(metadata)
                ranges = here.ranges(), peer.region("shared").ranges()
                await agent.post(op, *ranges, peer).wait()
                os.kill(child.pid, signal.SIGSTOP)
                with pytest.raises(PeerLost):
                    await agent.post(op, *ranges, peer).wait()
                with pytest.raises(MemoryInUse, match="by what was cancelled"):
                    await agent.deregister(here)
                assert agent.quarantined == (here,)
                os.kill(child.pid, end)
                async with asyncio.timeout(FREE_WITHIN_S):
                    while agent.quarantined:  # noqa: ASYNC110 - UCX ends what it had posted
                        await asyncio.sleep(0.02)
                await agent.deregister(here)
                arena.array[:] = UNTOUCHED
                await asyncio.sleep(0.3)
                assert (arena.array == UNTOUCHED).all()
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
