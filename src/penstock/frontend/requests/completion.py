"""Runs one request: turns the engine's deltas of all its choices into text events.

Independent of HTTP. Each choice is a small state machine (`choice_text.py`) fed with deltas.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import msgspec

from penstock.core.errors import EngineError, RequestError
from penstock.core.log import get_logger
from penstock.core.types.requests import Delta, Request
from penstock.core.wire import PackedTokens, num_tokens, token_list
from penstock.frontend.metrics import RequestTimer
from penstock.frontend.openai.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from penstock.frontend.parsing.parser import OutputParser
from penstock.frontend.parsing.source import Repair
from penstock.frontend.requests.choice_text import ChoiceText, PromptedChoice
from penstock.frontend.requests.direct_text import ChunkWriter, DirectText
from penstock.frontend.requests.next_turns import Answer, OnAnswer
from penstock.frontend.requests.preprocess import PreparedRequest
from penstock.frontend.text.events import TextEvent
from penstock.runtime.requests.direct_streams import is_direct
from penstock.seams import Hold, RequestDispatcher, RequestStream

_log = get_logger()
_GATHERED_BYTES = 4096
"""Packed tokens of a whole answer that are made text at once: 1,024 of them."""

Emit = Callable[[TextEvent], Hold | None]
"""Receives an event; what it gives is waited for before more tokens of that choice are taken."""


class Completion:
    """Runs a request's choices concurrently and passes their events to one receiver."""

    def __init__(
        self,
        prepared: PreparedRequest,
        dispatcher: RequestDispatcher,
        timer: RequestTimer,
        *,
        explains: bool = False,
        on_answer: OnAnswer | None = None,
    ) -> None:
        """Take a prepared request.

        Args:
            prepared: the request.
            dispatcher: sends it to workers.
            timer: observes it.
            explains: each choice's last event has its routing decisions.
            on_answer: called with the whole answer once the receiver has it, if the request has one choice.
        """
        self._explains = explains
        self._on_answer = on_answer
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._prepared = prepared
        self._dispatcher = dispatcher
        self._timer = timer
        plan, prompted = prepared.parser, bool(prepared.prompts) or prepared.drops_output
        self._direct: list[DirectText] = []
        self._choices = [
            (PromptedChoice if prompted else ChoiceText)(
                index,
                prepared.model.detokenizer if plan is None else prepared.model.marked_detokenizer,
                prepared.stops,
                begins_text=prepared.begins_text,
                min_tokens=prepared.min_tokens,
                shows_stop=prepared.shows_stop,
                parser=None if plan is None else OutputParser(plan),
            )
            for index in range(len(prepared.requests))
        ]
        for choice in self._choices:
            if isinstance(choice, PromptedChoice):
                choice.say(prepared.prompt_of(choice.index), drops_output=prepared.drops_output)

    async def run(self, emit: Emit, *, gathers: bool = False, writer: ChunkWriter | None = None) -> None:
        """Run until every choice has ended; cancelling this cancels all of them.

        Args:
            emit: receives each event, within the call that brings its tokens.
            gathers: tokens wait for others, as nobody sees the answer before its end.
            writer: gets chunks of plain text in place of events, once it says what is around them.

        Raises:
            PenstockError: a choice failed; the others are cancelled.
        """
        failed = True
        prepared = self._prepared
        plain = not (prepared.stops or prepared.prompts or prepared.drops_output or prepared.gives_token_ids)
        plain = plain and prepared.logprobs is None and prepared.parser is None
        gathers = gathers and plain
        writer = writer if plain and self._on_answer is None else None
        run = partial(self._run_choice, emit=emit, gathers=gathers, writer=writer)
        try:
            streams = self._open()
            if len(self._choices) == 1:
                await run(self._choices[0], self._prepared.requests[0], streams[0])
                failed = False
                if self._on_answer is not None:
                    self._on_answer(Answer("".join(self._text), self._token_ids, streams[0]))
                return
            async with asyncio.TaskGroup() as group:
                for choice, request, opened in zip(
                    self._choices, self._prepared.requests, streams, strict=True
                ):
                    group.create_task(run(choice, request, opened))
            failed = False
        except asyncio.CancelledError:
            failed = False
            raise
        except RequestError as error:
            prepared.fields.rename(error)
            raise
        except ExceptionGroup as errors:
            with prepared.fields:
                raise errors.exceptions[0] from errors
        finally:
            self._timer.finish(self.usage(), asyncio.get_running_loop().time(), failed=failed)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before it."""
        return self._timer.ttft_s

    def tokens(self) -> tuple[int, int]:
        """Count (prompt, output) tokens so far, as `usage` does."""
        return self._prepared.prompt_tokens, self._output_tokens()

    def _output_tokens(self) -> int:
        by_sinks = sum(choice.output_tokens for choice in self._choices)
        return by_sinks + sum(direct.tokens for direct in self._direct)

    def usage(self) -> Usage:
        """Count tokens so far: each prompt once, and the output of every choice."""
        prompt_tokens = self._prepared.prompt_tokens
        output_tokens = self._output_tokens()
        cached_tokens = sum(
            choice.cached_tokens for choice in self._choices[:: self._prepared.choices_per_prompt]
        )
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=prompt_tokens + output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens)
            if reasoning_tokens
            else msgspec.UNSET,
        )

    def _open(self) -> Sequence[RequestStream]:
        """Open the streams of all choices, each further choice of a prompt `beside` its first."""
        streams: list[RequestStream] = []
        for index, request in enumerate(self._prepared.requests):
            first = index - index % self._prepared.choices_per_prompt
            streams.append(self._dispatcher.open(request, beside=streams[first] if first < index else None))
        return streams

    async def _run_choice(
        self,
        choice: ChoiceText,
        request: Request,
        opened: RequestStream,
        *,
        emit: Emit,
        gathers: bool,
        writer: ChunkWriter | None,
    ) -> None:
        timer, clock = self._timer, asyncio.get_running_loop().time
        last: float | None = None
        decisions: Sequence[object] = ()
        gathered = bytearray()
        feed = _feed_of(choice, self._prepared)
        direct: DirectText | None = None
        if writer is not None and is_direct(choice.decoder):
            direct = DirectText(choice.index, choice.decoder, timer, writer)
            self._direct.append(direct)

        def take(delta: Delta) -> Hold | None:
            nonlocal last
            if delta.token_ids:
                now = clock()
                last = last if direct is None else direct.step(now)
                timer.tokens(len(delta.token_ids) >> 2, now, last, opened)
                last = now
            if gathers:
                is_last = delta.finish_reason is not None
                if not is_last and delta.cached_tokens is None and len(gathered) < _GATHERED_BYTES:
                    gathered.extend(delta.token_ids)
                    return None
                delta = msgspec.structs.replace(
                    delta, token_ids=PackedTokens(bytes(gathered + delta.token_ids))
                )
                gathered.clear()
            event = feed(delta)
            if self._on_answer is not None:
                self._token_ids += token_list(delta.token_ids)
                self._text.append(choice.raw)
                choice.raw = ""
            if event is None:
                return None
            if choice.finished:
                opened.stop()
                if self._explains:
                    event = msgspec.structs.replace(event, decisions=self._explained(request) or decisions)
            return emit(event)

        try:
            async with opened as stream:
                decisions = self._explained(request)
                await stream.run(take, direct)
        finally:
            choice.output_tokens += num_tokens(bytes(gathered))
            if direct is not None:
                direct.finish()
            self._count_repairs(choice)
        if not choice.finished:
            raise EngineError("the worker's stream ended without a finish reason; try again")

    def _count_repairs(self, choice: ChoiceText) -> None:
        for repair in choice.repairs:
            self._timer.repaired(repair)
            _log_once(self._prepared.model.card.name, repair)

    def _explained(self, request: Request) -> Sequence[object]:
        """Give the routing decisions so far. Read at the start and at the end: retries add decisions, and the dispatcher forgets old ones."""
        return self._dispatcher.explain(request.request_id) if self._explains else ()


@lru_cache(maxsize=1024)
def _log_once(model: str, repair: Repair) -> None:
    """Log that a model writes tool calls out of its grammar, once in this process; all of them are counted."""
    _log.warning(
        "tool_call_repaired",
        model=model,
        repair=repair.value,
        counted="penstock_frontend_tool_call_repairs_total",
    )


def _feed_of(choice: ChoiceText, prepared: PreparedRequest) -> Callable[[Delta], TextEvent | None]:
    """Give `choice.feed`, or one whose events have the ids of the output tokens since the one before.

    With log-probabilities, which wait for their token's text, an event has as many ids as it has of these; the last one has the rest.
    """
    if not prepared.gives_token_ids:
        return choice.feed
    beside_logprobs = prepared.logprobs is not None
    token_ids: list[int] = []

    def feed(delta: Delta) -> TextEvent | None:
        nonlocal token_ids
        counted = choice.output_tokens
        event = choice.feed(delta)
        token_ids += token_list(delta.token_ids)[: choice.output_tokens - counted]
        if event is not None:
            holds = beside_logprobs and event.finish_reason is None
            given = len(event.logprobs) if holds else len(token_ids)
            event = msgspec.structs.replace(event, token_ids=token_ids[:given])
            token_ids = token_ids[given:]
        return event

    return feed
