"""Runs one request: turns the engine's deltas of all its choices into text events.

Independent of HTTP. Each choice is a small state machine fed with deltas.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Protocol

import msgspec

from penstock.core.errors import EngineError, RequestError
from penstock.core.log import get_logger
from penstock.core.types.requests import Delta, FinishReason, PromptLogprobs, Request, TokenLogprob
from penstock.core.wire import NO_TOKENS, PackedTokens, num_tokens, token_list
from penstock.frontend.apis.dialect import CompletionTokensDetails, PromptTokensDetails, Usage
from penstock.frontend.metrics import RequestTimer
from penstock.frontend.prepare import PreparedRequest
from penstock.frontend.text.answer import PromptPart, TextEvent, TokenText, merged
from penstock.frontend.text.parser import OutputParser
from penstock.frontend.text.source import Repair
from penstock.frontend.text.tokens import Detokenizer, StopFinder, TextDecoder
from penstock.runtime.requests.direct_streams import DirectStream, is_direct
from penstock.seams import DirectClient, Hold, Interrupt, RequestDispatcher, RequestStream

_TOKEN_BYTES = 4
_GIVEN_UP = frozenset({FinishReason.ERROR, FinishReason.PREFILLED})


class ChoiceText:
    """Converts one choice's deltas to text events. Not thread-safe; one task owns it."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        *,
        begins_text: bool,
        min_tokens: int = 0,
        shows_stop: bool = False,
        parser: OutputParser | None = None,
    ) -> None:
        """Start a choice.

        Args:
            index: its place among the answer's choices.
            detokenizer: of the model.
            stops: strings that end it.
            begins_text: as in `Detokenizer.stream`.
            min_tokens: stop strings are not searched in the text of so many tokens at its start.
            shows_stop: the text of what ended it, a stop string or a stop token, stays in its text.
            parser: reads reasoning and tool calls; None: all text is for the user.
        """
        self._parser = parser
        self.index = index
        self._min_tokens = min_tokens if stops else 0
        self._shows_stop = shows_stop
        self.output_tokens = 0
        self.reasoning_tokens = 0
        """Of `output_tokens`, those that came while the answer was reasoning, the marks around it included."""
        self.cached_tokens = 0
        self.finished = False
        self.decoder: TextDecoder = detokenizer.stream(begins_text=begins_text)
        self._finder = StopFinder(stops) if stops else None
        self._decoded = 0  # characters decoded
        self._given = 0  # characters given out
        self._waiting: deque[TokenText] = deque()  # log-probabilities of tokens whose text is held back
        self.is_plain = not stops and parser is None
        """Whether its text is that of its tokens, and nothing in it ends the choice."""

    def feed(self, delta: Delta) -> TextEvent | None:
        """Convert a delta; None while all its text is held back.

        Raises:
            EngineError: the worker ended the request with an error.
        """
        if delta.finish_reason in _GIVEN_UP:
            raise EngineError(f"the worker ended the request as {delta.finish_reason}; try again")
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if self._parser is not None and len(delta.token_ids) > _TOKEN_BYTES:
            return self._feed_each(delta)
        token_ids = token_list(delta.token_ids)
        if self.is_plain and delta.finish_reason is None and not delta.logprobs and not self._waiting:
            self.output_tokens += len(token_ids)
            text = self.decoder.feed(token_ids)
            if not text:
                return None
            self._decoded += len(text)
            self._given = self._decoded
            return TextEvent(self.index, text)
        tokens_before = self.output_tokens
        self.output_tokens += len(token_ids)
        if delta.finish_reason is FinishReason.STOP and token_ids and not self._shows_stop:
            token_ids.pop()  # the stop token counts as output but has no text
        used, text = self._decode(token_ids, delta.logprobs)
        stopped = used is not None
        reason = "stop" if stopped else None
        if used is not None:
            self.output_tokens = tokens_before + used
        elif delta.finish_reason is not None:
            stopped, rest = self._end()
            text += rest
            reason = "length" if delta.finish_reason is FinishReason.LENGTH and not stopped else "stop"
        if not text and reason is None:
            return None
        self._given += len(text)
        self.finished = reason is not None
        everything = self.finished and not stopped
        logprobs = self._take_logprobs(None if everything else self._given) if self._waiting else ()
        if self._parser is not None:
            event = self._parse(self._parser, text, reason, logprobs)
            if self._parser.is_reasoning or (event is not None and event.reasoning and not event.text):
                self.reasoning_tokens = self.output_tokens
            return event
        return TextEvent(self.index, text, reason, logprobs, stopped_by=self._stopped_by())

    def _feed_each(self, delta: Delta) -> TextEvent | None:
        """Convert a delta of several tokens one by one, so that each is counted as reasoning or not; their events go as one."""
        events: list[TextEvent] = []
        packed = delta.token_ids
        for index in range(num_tokens(packed)):
            start = index * _TOKEN_BYTES
            is_last = start + _TOKEN_BYTES == len(packed)
            one = Delta(
                request_id=delta.request_id,
                token_ids=PackedTokens(packed[start : start + _TOKEN_BYTES]),
                finish_reason=delta.finish_reason if is_last else None,
                logprobs=delta.logprobs[index : index + 1],
            )
            event = self.feed(one)
            if event is not None:
                events.append(event)
            if self.finished:
                break
        return merged(events) if events else None

    def _parse(
        self, parser: OutputParser, text: str, reason: str | None, logprobs: tuple[TokenText, ...]
    ) -> TextEvent | None:
        parsed = parser.feed(text)
        parts = parsed.parts or (parsed,)
        if reason is not None:
            rest = parser.finish(is_cut=reason == "length" or self._stopped_by() is not None)
            parts += rest.parts or (rest,)
            if reason == "stop" and parser.num_calls and not parser.cuts_call:
                reason = "tool_calls"
        elif not (parsed.content or parsed.reasoning or parsed.calls or logprobs):
            return None
        its_text = next((at for at, part in enumerate(parts) if part.content), 0)
        return merged(
            [
                TextEvent(
                    self.index,
                    part.content,
                    reason,
                    logprobs if at == its_text else (),
                    reasoning=part.reasoning,
                    calls=part.calls,
                    stopped_by=self._stopped_by(),
                    cuts_call=reason is not None and parser.cuts_call,
                )
                for at, part in enumerate(parts)
            ]
        )

    @property
    def repairs(self) -> Sequence[Repair]:
        """What was mended in tool calls."""
        return () if self._parser is None else self._parser.repairs

    def _stopped_by(self) -> str | None:
        return None if self._finder is None else self._finder.found

    def _decode(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[int | None, str]:
        """Give the number of tokens that completed a stop string (None without one), and the new text."""
        if self._finder is None and not logprobs:
            text = self.decoder.feed(token_ids)
            self._decoded += len(text)
            return None, text
        text = ""
        for index, token_id in enumerate(token_ids):
            if index < len(logprobs):
                self._waiting.append(TokenText(logprobs[index], self._decoded))
            decoded = self.decoder.feed((token_id,))
            self._decoded += len(decoded)
            if self.output_tokens - len(token_ids) + index < self._min_tokens:
                text += decoded
                continue
            stopped, found = self._find(decoded)
            text += found
            if stopped:
                return index + 1, text
        return None, text

    def _end(self) -> tuple[bool, str]:
        stopped, text = self._find(self.decoder.finish())
        if not stopped and self._finder is not None:
            text += self._finder.finish()
        return stopped, text

    def _find(self, text: str) -> tuple[bool, str]:
        if self._finder is None:
            return False, text
        text, stopped = self._finder.feed(text)
        if stopped and self._shows_stop:
            text += self._finder.found or ""
        return stopped, text

    def _take_logprobs(self, before: int | None) -> tuple[TokenText, ...]:
        waiting, taken = self._waiting, []
        while waiting and (before is None or waiting[0].start < before):
            taken.append(waiting.popleft())
        return tuple(taken)


class PromptedChoice(ChoiceText):
    """A choice whose answer says something of its prompt, or has no tokens of its own. Not thread-safe; one task owns it."""

    def say(self, prompt: PromptPart | None, *, drops_output: bool) -> None:
        """Have the first event say `prompt`, with the log-probabilities that will come; `drops_output` drops the engine's tokens."""
        self._prompt, self._drops_output = prompt, drops_output
        self._logprobs: list[PromptLogprobs] = []
        self._decoded = self._given = 0 if prompt is None else len(prompt.text)
        self._lists_stop = prompt is not None and prompt.echoed is not None
        """Whether the stop token, which has no text, has its log-probability: who reads echoed ones counts on one for each token."""

    def feed(self, delta: Delta) -> TextEvent | None:
        self._logprobs += delta.prompt_logprobs
        if self._drops_output and delta.token_ids:
            delta = msgspec.structs.replace(
                delta, token_ids=NO_TOKENS, logprobs=(), finish_reason=FinishReason.LENGTH
            )
        event = super().feed(delta)
        if event is None:
            return None
        if (
            self._lists_stop
            and delta.finish_reason is FinishReason.STOP
            and delta.logprobs
            and not event.stopped_by
        ):
            last = TokenText(delta.logprobs[-1], self._decoded)
            event = msgspec.structs.replace(event, logprobs=(*event.logprobs, last))
        if self._prompt is None:
            return event
        prompt = dataclasses.replace(self._prompt, logprobs=tuple(self._logprobs))
        self._prompt = None
        return msgspec.structs.replace(event, prompt=prompt)


class ChunkWriter(Protocol):
    """A stream of chunks to a client."""

    def around_text(self, index: int) -> tuple[bytes, bytes, bool] | None:
        """Give the bytes around the text of a choice's plain chunks, and whether they are HTTP's; None before the first chunk."""
        ...

    def client(self, stream: DirectStream) -> tuple[asyncio.WriteTransport, int] | None:
        """Let a stream write chunks as they are; give where to, and how many bytes may be unsent. None: the client is gone."""
        ...

    def why(self, *, is_gone: bool) -> Hold | Exception:
        """Give what has to be waited for until a client that is behind has read, or the error for one that is gone."""
        ...


class DirectText:
    """The `DirectSink` of one choice, and the time of its latest tokens by either way. One event loop owns it."""

    def __init__(self, index: int, decoder: TextDecoder, timer: RequestTimer, writer: ChunkWriter) -> None:
        self._index = index
        self._decoder = decoder
        self._timer = timer
        self._writer = writer
        self._last_s: float | None = None
        self._stream: DirectStream | None = None

    @property
    def tokens(self) -> int:
        """Tokens that were written by the rule."""
        return 0 if self._stream is None else self._stream.tokens

    def step(self, now_s: float) -> float | None:
        """Note that tokens come to the sink at `now_s`; returns the time of the tokens before, None for the first ones."""
        last_s = self._last_s if self._stream is None else self._stream.last_s
        if self._stream is None:
            self._last_s = now_s
        else:
            self._stream.last_s = now_s
        return last_s

    def open(self, interrupt: Interrupt) -> tuple[DirectStream, DirectClient] | None:
        if self._stream is None:
            around = self._writer.around_text(self._index)
            if around is None or self._last_s is None:
                return None
            before, after, is_chunked = around
            self._stream = DirectStream(self._decoder, before, after, is_chunked=is_chunked)
            self._stream.last_s = self._last_s
        client = self._writer.client(self._stream)
        if client is None:
            return None

        def interrupted(is_gone: bool) -> None:  # noqa: FBT001 - called by native code
            interrupt(self._writer.why(is_gone=is_gone))

        transport, buffer_bytes = client
        return self._stream, DirectClient(transport, buffer_bytes, self._timer.gather, interrupted)

    def finish(self) -> None:
        """Tell the timer of the gaps that it has not seen."""
        if self._stream is not None:
            self._timer.add_gaps(self._stream.gaps_s, self._stream.tokens)


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
    ) -> None:
        """Take a prepared request.

        Args:
            prepared: the request.
            dispatcher: sends it to workers.
            timer: observes it.
            explains: each choice's last event has its routing decisions.
        """
        self._explains = explains
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
        writer = writer if plain else None
        run = partial(self._run_choice, emit=emit, gathers=gathers, writer=writer)
        try:
            streams = self._open()
            if len(self._choices) == 1:
                await run(self._choices[0], self._prepared.requests[0], streams[0])
                failed = False
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
            error.rename(prepared.fields.of)
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
