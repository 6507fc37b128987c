"""Peer processes of a suite.

Peers are forked from a server that has imported everything already, so each starts in milliseconds. They end with the test's
process, also if that is killed.
"""

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerProcess
from typing import Any, Protocol, Self

import uvloop

from penstock.core.errors import Unavailable
from penstock.core.types.instances import Instance
from penstock.runtime.config import EventConfig, PlaneConfig
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.tcp import TcpPlane
from penstock.runtime.tls import PlaneTls, PlaneTlsConfig
from penstock.seams import Discovery, EventCarrier
from penstock.testing.planes.scripted_worker import ScriptedWorker

_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Cues:
    """Signals between a peer and its test: call `say_ready` once the peer serves, and end when `end` is set."""

    say_ready: Callable[[str], None]
    end: asyncio.Event


class Carrier(EventCarrier, AbstractAsyncContextManager["Carrier"], Protocol):
    """An event carrier that works while its context is entered."""


CarrierFactory = Callable[[Identity], Carrier]
"""Makes a process's carrier; it can be pickled."""
Part = Callable[..., Awaitable[None]]
"""A module's coroutine function, called as `part(cues, *arguments)`."""


class Peer:
    """A process that runs a part of a test."""

    def __init__(self, process: ForkServerProcess, pipe: Pipe, value: str) -> None:
        self.value = value
        """The text that the peer passed to `say_ready`."""
        self._process = process
        self._pipe = pipe

    @classmethod
    async def start(cls, part: Part, *arguments: Any, loop: str = "uvloop") -> Self:
        """Start a peer on its own event loop (`uvloop` or `asyncio`) and wait until it is ready.

        Raises:
            Unavailable: the peer ended, or took too long.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe()
        process = context.Process(target=_play, args=(theirs, loop, part, arguments), daemon=True)
        process.start()
        theirs.close()
        try:
            if not await asyncio.to_thread(ours.poll, _START_TIMEOUT_S):
                process.kill()
                raise Unavailable(f"peer {part.__name__}: not ready within {_START_TIMEOUT_S:g} s")
            return cls(process, ours, ours.recv())
        except EOFError as error:
            raise Unavailable(
                f"peer {part.__name__}: ended before it was ready; its traceback is above"
            ) from error

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def kill(self) -> None:
        """Kill it with SIGKILL: it cannot send a goodbye."""
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    async def close(self) -> None:
        """Make it end by itself. Safe after `kill`, and twice."""
        self._pipe.close()
        await asyncio.to_thread(self._process.join, _END_TIMEOUT_S)
        if self._process.is_alive():
            await self.kill()


def _play(pipe: Pipe, loop: str, part: Part, arguments: tuple[Any, ...]) -> None:
    async def run() -> None:
        cues = Cues(pipe.send, asyncio.Event())
        asyncio.get_running_loop().add_reader(pipe.fileno(), cues.end.set)  # readable only at end of file
        await part(cues, *arguments)

    loop_factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


async def worker_peer(
    cues: Cues,
    identity: Identity,
    at: tuple[str, PlaneTlsConfig | None, CarrierFactory | None],
    config: PlaneConfig,
    events: EventConfig,
) -> None:
    """Serve a `ScriptedWorker` on sockets `at` an address, with certificates and a carrier or without; report its address."""
    listen, tls, make_carrier = at
    worker = ScriptedWorker(events)
    worker.say_goodbye = cues.end.set
    async with AsyncExitStack() as stack:
        carrier = None if make_carrier is None else make_carrier(identity)
        if carrier is not None:
            await stack.enter_async_context(carrier)
        plane = TcpPlane(identity, listen=listen, tls=PlaneTls.of(tls), config=config, carrier=carrier)
        server = await plane.serve(worker)
        cues.say_ready(server.address)
        await cues.end.wait()
        await server.close()


async def member_peer(
    cues: Cues, client: Callable[[], AbstractAsyncContextManager[Discovery]], instance: Instance
) -> None:
    """Register an instance by a client of its own, and keep it registered."""
    async with client() as discovery:
        await discovery.register(instance)
        cues.say_ready(instance.name)
        await cues.end.wait()
