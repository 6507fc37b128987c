"""A `WorkerSink` that records everything, for tests to wait for and to inspect."""

import asyncio
from collections.abc import Callable, Sequence

from penstock.core.errors import WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventMessage
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta
from penstock.core.wire import unpack_tokens


class RecordingSink:
    """The recorded deltas, loads and events of one frontend. One event loop owns it."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[Delta]] = {}
        self.frame_sizes: list[int] = []
        """Deltas in each push."""
        self.written_tokens = 0
        self.loads: list[WorkerLoad] = []
        self.events: list[EventMessage] = []
        self.on_event: Callable[[EventMessage], None] = lambda _message: None
        self.losses: list[tuple[WorkerId, WorkerLost]] = []
        self._changed = asyncio.Event()

    def push(self, worker_id: WorkerId, deltas: Sequence[Delta]) -> None:
        self.frame_sizes.append(len(deltas))
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        self._note(worker_id)

    def written(self, worker_id: WorkerId, tokens: int) -> None:
        self.written_tokens += tokens
        self._note(worker_id)

    def push_event(self, worker_id: WorkerId, message: EventMessage) -> None:
        self.events.append(message)
        self.on_event(message)
        self._note(worker_id)

    def push_load(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        self.loads.append(load)
        self._note(worker_id)

    def lost(self, worker_id: WorkerId, error: WorkerLost) -> None:
        self.losses.append((worker_id, error))
        self._changed.set()

    def tokens(self, request_id: str) -> list[int]:
        """Return the token ids of a request so far."""
        return [
            t for delta in self.deltas.get(request_id, ()) for t in unpack_tokens(delta.token_ids).tolist()
        ]

    def last(self, request_id: str | RequestId) -> Delta | None:
        """Return the delta that ended a request; None while it runs."""
        deltas = self.deltas.get(request_id, [])
        return deltas[-1] if deltas and deltas[-1].finish_reason is not None else None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` holds. The caller sets a timeout."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def finished(self, request_id: str) -> Delta:
        """Wait for the delta that ends a request."""
        await self.until(lambda: self.last(request_id) is not None)
        last = self.last(request_id)
        assert last is not None
        return last

    def _note(self, worker_id: WorkerId) -> None:
        assert not self.losses, f"worker {worker_id}: something came after `lost`"
        self._changed.set()
