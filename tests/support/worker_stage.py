"""One worker on a manual engine, and its frontends, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.core.errors import EngineError
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventMessage
from penstock.core.types.instances import InstanceState
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request, SamplingParams
from penstock.core.wire import PackedHashes, pack_hashes, pack_tokens
from penstock.runtime.discovery.view import MemoryDiscovery
from penstock.runtime.requests.memory import MemoryPlane
from penstock.sim.loop import run_virtual
from penstock.worker.config import WorkerConfig
from penstock.worker.registration import WorkerIdentity
from penstock.worker.worker import Worker
from tests.support.cluster import small_card
from tests.support.manual_engine import ManualEngine


class Sink:
    """One frontend that records what it is sent."""

    def __init__(self) -> None:
        self.frames: list[tuple[Delta, ...]] = []
        self.loads: list[WorkerLoad] = []
        self.events: list[EventMessage] = []

    def push(self, deltas: Sequence[Delta]) -> None:
        self.frames.append(tuple(deltas))

    def push_load(self, load: WorkerLoad) -> None:
        self.loads.append(load)

    def push_event(self, message: EventMessage) -> None:
        self.events.append(message)

    def error(self, request_id: str) -> str:
        """Return the code of the error that a request ended with."""
        (delta,) = (
            d for frame in self.frames for d in frame if d.request_id == request_id and d.error is not None
        )
        assert delta.finish_reason is FinishReason.ERROR
        assert delta.error is not None
        return delta.error.code


def make_request(
    request_id: str,
    *,
    tokens: tuple[int, ...] = (1, 2, 3, 4, 5),
    hashes: bytes | None = None,
    deadline_s: float | None = None,
    known_peer_arrivals: int | None = None,
) -> Request:
    """Make a request for nine tokens after a prompt, with these block hashes or the correct ones."""
    return Request(
        request_id=RequestId(request_id),
        model="tiny",
        token_ids=pack_tokens(tokens),
        block_hashes=pack_hashes(block_hashes(tokens, 4)) if hashes is None else PackedHashes(hashes),
        sampling=SamplingParams(max_tokens=9),
        deadline_s=deadline_s,
        known_peer_arrivals=known_peer_arrivals,
    )


async def settle() -> None:
    """Run everything that is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


class Stage:
    """One worker with its manual engine and its registry."""

    def __init__(
        self,
        config: WorkerConfig | None = None,
        read_file: Callable[[str], bytes | None] = {"abc": b"content"}.get,
    ) -> None:
        self.engine = ManualEngine()
        self.discovery = MemoryDiscovery()
        self.worker = Worker(
            self.engine,
            self.discovery,
            MemoryPlane(),
            identity=WorkerIdentity(WorkerId(7), "w1"),
            card=small_card(),
            read_file=read_file,
            config=config,
        )
        self.error: BaseException | None = None

    def sink(self) -> Sink:
        sink = Sink()
        self.worker.connected(sink)
        return sink

    def state(self) -> InstanceState | None:
        (instance,) = self.discovery._table._instances.values() or (None,)
        return None if instance is None else instance.state

    async def run(self) -> None:
        try:
            await self.worker.run()
        except EngineError as error:
            self.error = error


def run_scenario(scene: Callable[[Stage], Awaitable[None]], config: WorkerConfig | None = None) -> None:
    async def main() -> None:
        stage = Stage(config)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.run())
            await stage.worker.ready.wait()
            await scene(stage)
            stage.worker.check()
            stage.worker.stop()
            await asyncio.sleep(100)
            assert running.done()
        assert stage.engine.closed
        assert not len(stage.discovery._table)

    run_virtual(main())
