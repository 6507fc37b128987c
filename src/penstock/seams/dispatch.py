"""Dispatch: what a frontend needs of routers and workers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from penstock.core.types.instances import CardFile, ModelCard, Role
from penstock.core.types.kv import KvAction, PrefixSummary
from penstock.core.types.load import ModelLoad
from penstock.core.types.requests import Delta, ExpandedPrompt, MediaPrompt, Request

Hold = Callable[[], Awaitable[None]]
"""What a reader has to wait for before it takes more."""

DeltaSink = Callable[[Delta], Hold | None]
"""Takes a delta; what it gives is waited for first, while later deltas are merged."""


Interrupt = Callable[[Hold | Exception], None]
"""Ends direct writing: with what is waited for first, or with the error that ends the stream."""


class DirectStream(Protocol):
    """The rule by which a stream's tokens become bytes for its client, and its counts."""

    tokens: int
    """Tokens that were written by the rule."""


class DirectClient(NamedTuple):
    """Where a direct stream's chunks go, one write each.

    Attributes:
        transport: of the client's connection.
        buffer_bytes: with more than this unsent, the client is behind.
        passed: called with the mean gap in seconds before the tokens of each chunk.
        interrupted: called with whether the client is gone; else it is behind.
    """

    transport: asyncio.WriteTransport
    buffer_bytes: int
    passed: Callable[[float], object]
    interrupted: Callable[[bool], None]


class DirectSink(Protocol):
    """A sink's other way: while a stream's deltas are tokens and nothing else, their chunks are written by a rule."""

    def open(self, interrupt: Interrupt) -> tuple[DirectStream, DirectClient] | None:
        """Give the rule, and where it writes to; None as long as the stream needs its sink."""
        ...


class RequestStream(Protocol):
    """One request in progress. Leaving the context cancels it, unless it has ended. One task reads it, by `run` or by iterating."""

    waited_for_decode: bool
    """Whether the first token waited for decode workers rather than for prefill workers: one computed the prompt, or none had a batch
    slot for most of the time. False before the first token, and where no role is decode."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def run(self, sink: DeltaSink, direct: DirectSink | None = None) -> None:
        """Call `sink` with each delta, in the turn of the event loop that brings it, until the last one or `stop`. It must not block.

        Deltas of one turn are merged. Those with nothing but tokens may be written by the rule of `direct` instead.

        Raises:
            PenstockError: as iterating.
            Exception: what the sink raised.
        """
        ...

    def stop(self) -> None:
        """Make `run` return without further deltas."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas, the last one with a `finish_reason`. Deltas that a slow reader has not taken are merged into one.

        Raises:
            PenstockError: the request cannot be served, or fails before its end.
        """
        ...


class RequestDispatcher(Protocol):
    """Lists the models of the deployment and runs requests on its workers."""

    def open(self, request: Request, *, beside: RequestStream | None = None) -> RequestStream:
        """Prepare a request; it is sent when the context is entered.

        Args:
            request: one choice of a user request.
            beside: stream of another choice of the same user request, entered or about to be. The prompt is prefilled for
                one of the choices; the others go to the same worker and reuse its KV. Or a stream that has ended: the request
                goes to its worker while that may get it.
        """
        ...

    def models(self) -> Mapping[str, ModelCard]:
        """Model name -> card, of all models with a ready worker; the card of a LoRA adapter has a `parent`."""
        ...

    def expects(self, name: str) -> bool:
        """Say whether a registered worker that cannot take requests now serves this model or adapter."""
        ...

    def load(self, model: str) -> ModelLoad | None:
        """Give the load of a model's ready workers together; None without any."""
        ...

    def prefix_summary(
        self, model: str, cache_salt: str, after: Mapping[int, int], interval_s: float
    ) -> PrefixSummary | None:
        """Give the next changes of what another region is told of a model's prefixes here; None where none is told.

        Args:
            model: its name.
            cache_salt: of the tenant that the link's key is of; empty: none.
            after: the last version that the link has of each router's process.
            interval_s: the time since the link asked last, for which it gets bytes.
        """
        ...

    def retry_after_s(self) -> float:
        """Estimate from the queued requests when a client that is refused now should retry."""
        ...

    async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
        """Fetch one of the card's files from any worker of the model.

        Raises:
            Unavailable: no worker answered.
        """
        ...

    async def expand_media(self, card: ModelCard, prompt: MediaPrompt) -> ExpandedPrompt:
        """Have the engine of one of the model's workers expand the media of a prompt.

        Raises:
            RequestError: the engine does not take them.
            Unavailable: no worker answered.
        """
        ...

    def workers(self) -> Sequence[object]:
        """Describe every known worker, for people; msgspec can encode the values."""
        ...

    def explain(self, request_id: str) -> Sequence[object]:
        """Describe the routing decisions of a request, as `workers` does; empty if unknown or forgotten.

        Args:
            request_id: id of one choice, or of an answer for all its choices.
        """
        ...

    def latest_decisions(self, most: int) -> Sequence[object]:
        """Describe the latest `most` routing decisions, oldest first."""
        ...

    def journeys(self, answer_id: str) -> Sequence[object]:
        """Describe which workers had a request and when, as `workers` does; empty if unknown or forgotten.

        Args:
            answer_id: as in `explain`.
        """
        ...

    def latest_journeys(self, most: int) -> Sequence[object]:
        """Describe the ways of the latest `most` requests: those under way first, then the newest that have ended."""
        ...

    def queued(self) -> tuple[int, float]:
        """Give (requests that wait for a worker, seconds that the oldest of them has waited)."""
        ...

    async def act_on_kv(self, action: KvAction, worker: str | None) -> Sequence[object]:
        """Act on the KV cache of a worker, or of every worker for None; describe each result, as `workers` does.

        Raises:
            RequestError: there is no worker of this name (404), it refuses, or all refuse.
            Unavailable: the worker cannot be reached, or no worker is there.
        """
        ...

    async def change_role(self, worker: str, role: Role) -> object:
        """Change a worker's role; return a description of the result that msgspec can encode.

        Raises:
            RequestError: there is no worker of this name (404), or it cannot take this role (409).
            Unavailable: the worker cannot be reached.
        """
        ...

    async def sleep(self, worker: str, level: int) -> object:
        """Have a worker drain and give up its memory; the result is as `change_role`'s.

        Raises:
            RequestError: there is no worker of this name (404), no such level (400), or it cannot sleep now (409).
            Unavailable: the worker cannot be reached.
        """
        ...

    async def wake_up(self, worker: str) -> object:
        """Have a worker that sleeps take its memory and requests again; the result is as `change_role`'s.

        Raises:
            RequestError: there is no worker of this name (404), or it is awake (409).
            Unavailable: the worker cannot be reached.
        """
        ...
