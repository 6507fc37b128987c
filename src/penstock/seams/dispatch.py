"""What a frontend needs of everything behind it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from penstock.core.types.cards import CardFile, ModelCard
from penstock.core.types.instances import Role
from penstock.core.types.requests import Delta, Request


class RequestStream(Protocol):
    """One request under way. Leaving the context in any way cancels what is left of it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until the one with a `finish_reason`; what came while the reader was slow is one delta.

        Raises:
            PenstockError: the request cannot be served, or not to its end.
        """
        ...


class RequestDispatcher(Protocol):
    """What a frontend needs of the deployment: which models there are, and answers from them."""

    def open(self, request: Request, *, beside: RequestStream | None = None) -> RequestStream:
        """Prepare a request; it is sent when the context is entered.

        Args:
            request: what is asked.
            beside: another one of the same prompt, entered or about to be: it is computed for one of them, and the others
                go to the worker that has it.
        """
        ...

    def models(self) -> Mapping[str, ModelCard]:
        """Name the models that at least one ready worker serves now; a LoRA adapter is one whose card has a `parent`."""
        ...

    def expects(self, name: str) -> bool:
        """Say whether a worker that is listed, and cannot take requests now, serves this model or adapter."""
        ...

    def retry_after_s(self) -> float:
        """Say when a request that is refused now had better be sent again, by what waits for the workers."""
        ...

    async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
        """Fetch one of the card's files from any worker that has it.

        Raises:
            Unavailable: no worker answered.
        """
        ...

    def workers(self) -> Sequence[object]:
        """Describe every known worker in values that msgspec encodes; for people."""
        ...

    def explain(self, request_id: str) -> Sequence[object]:
        """Say why a request was sent where it was, as `workers` does; nothing where that is not known (any more).

        Args:
            request_id: a choice's; or an answer's, for those of all its choices.
        """
        ...

    def latest_decisions(self, most: int) -> Sequence[object]:
        """Say the same of the latest decisions, oldest first."""
        ...

    async def change_role(self, worker: str, role: Role) -> object:
        """Have a worker become one of another role, and say what came of it in values that msgspec encodes.

        Raises:
            RequestError: nobody is called so (404), or it cannot become that (409).
            Unavailable: the worker cannot be reached.
        """
        ...
