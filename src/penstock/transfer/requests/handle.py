"""A posted transfer: its state, how to wait for it or end it, and what it took."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from penstock.core.errors import PenstockError, TransferCancelled


class TransferState(Enum):
    """How far a transfer is."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Telemetry:
    """What a transfer moved, and what it took.

    Attributes:
        num_bytes: bytes to move.
        ranges: as they were posted; neighbours are merged before they move.
        backend: the transport that was chosen.
        expected_s: what each transport that could do it was expected to take; the lowest was chosen.
        refusals: why the others could not.
        failures: why those failed that were tried before `backend`.
        queue_s: seconds from `post` until bytes began to move.
        wire_s: seconds they moved.
    """

    num_bytes: int
    ranges: int
    backend: str
    expected_s: Mapping[str, float] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    queue_s: float = 0.0
    wire_s: float = 0.0

    @property
    def reason(self) -> str:
        """Say why this backend was chosen."""
        seconds = ", ".join(f"{name} {1e6 * value:,.0f} us" for name, value in self.expected_s.items())
        text = (
            f"lowest expected time: {seconds}"
            if len(self.expected_s) > 1
            else f"the only one that can: {seconds}"
        )
        failed = (f"{name} failed: {why}" for name, why in self.failures.items())
        return "; ".join([text, *failed, *(f"not {name}: {why}" for name, why in self.refusals.items())])


class TransferHandle:
    """One transfer under way, or past. `TransferAgent.post` makes them; the agent's event loop owns them."""

    __slots__ = ("_cancel", "_done", "_error", "state", "telemetry")

    def __init__(self, telemetry: Telemetry) -> None:
        """Begin as pending."""
        self.state = TransferState.PENDING
        self.telemetry = telemetry
        self._error: PenstockError | None = None
        self._done: asyncio.Future[None] | None = None  # made when somebody waits
        self._cancel: Callable[[], object] | None = None

    async def wait(self) -> None:
        """Return when every byte is where it belongs.

        Cancelling the wait leaves the transfer alone.

        Raises:
            PeerLost: the other agent is gone; where a write had begun, its memory may hold a part.
            TransferRefused: the peer does not let this happen.
            TransferCancelled: `cancel` was called.
            DeadlineExceeded: it took longer than its deadline.
            TransferError: anything else that went wrong.
        """
        if self.is_pending:
            if self._done is None:
                self._done = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._done)
        if self._error is not None:
            raise self._error

    async def complete(self) -> None:
        """Wait as `wait` does; but where this is cancelled, so is the transfer, and both sides' memory is free afterwards."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.cancel()
            while self.is_pending:
                assert self._done is not None, "waited"
                with suppress(
                    asyncio.CancelledError
                ):  # once more: it is on its way out, and memory comes first
                    await asyncio.wait([self._done])
            raise

    def cancel(self) -> None:
        """End it; both sides' memory is free once `wait` has raised. No error if it has ended."""
        if self.is_pending and self._cancel is not None:
            self._cancel()

    @property
    def is_pending(self) -> bool:
        """Whether it has not ended yet."""
        return self.state is TransferState.PENDING

    @property
    def error(self) -> PenstockError | None:
        """What `wait` raises, once it has failed."""
        return self._error

    def cancels_by(self, cancel: Callable[[], object]) -> None:
        """Know what ends it; for the agent."""
        self._cancel = cancel

    def finish(self, error: PenstockError | None = None) -> None:
        """Take note that it has ended; for the agent."""
        self._error = error
        if error is None:
            self.state = TransferState.DONE
        elif isinstance(error, TransferCancelled):
            self.state = TransferState.CANCELLED
        else:
            self.state = TransferState.FAILED
        self._cancel = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
