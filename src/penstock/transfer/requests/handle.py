"""The handle of a posted transfer: state, waiting, cancelling, telemetry."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from penstock.core.errors import PenstockError, TransferCancelled


class TransferState(Enum):
    """The state of a transfer."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Telemetry:
    """Measurements of a transfer.

    Attributes:
        num_bytes: bytes to move.
        ranges: number of ranges posted, before neighbours are merged.
        backend: the transport that was chosen.
        expected_s: expected seconds by transport, of those that can do it; the lowest was chosen.
        refusals: by transport, why it cannot do it.
        failures: by transport, the error of each that was tried before `backend`.
        queue_s: seconds from `post` until bytes began to move.
        wire_s: seconds that bytes moved.
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
    """The handle of a transfer, made by `TransferAgent.post`. The agent's event loop owns it."""

    __slots__ = ("_cancel", "_done", "_error", "state", "telemetry")

    def __init__(self, telemetry: Telemetry) -> None:
        """Begin as pending."""
        self.state = TransferState.PENDING
        self.telemetry = telemetry
        self._error: PenstockError | None = None
        self._done: asyncio.Future[None] | None = None  # made when somebody waits
        self._cancel: Callable[[], object] | None = None

    async def wait(self) -> None:
        """Return when every byte is at its target.

        Cancelling the wait does not cancel the transfer.

        Raises:
            PeerLost: the other agent is gone; its memory may hold a part of a write.
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
        """Wait as `wait` does. Cancelling this cancels the transfer too, and returns when both sides' memory is free."""
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
        """Cancel the transfer; both sides' memory is free once `wait` has raised. No error if it has ended."""
        if self.is_pending and self._cancel is not None:
            self._cancel()

    @property
    def is_pending(self) -> bool:
        """Whether it has not ended yet."""
        return self.state is TransferState.PENDING

    @property
    def error(self) -> PenstockError | None:
        """The error that `wait` raises, once it has failed."""
        return self._error

    def cancels_by(self, cancel: Callable[[], object]) -> None:
        """Set the function that cancels it; for the agent."""
        self._cancel = cancel

    def finish(self, error: PenstockError | None = None) -> None:
        """Mark it as ended; for the agent."""
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
