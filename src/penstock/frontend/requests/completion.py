"""Runs one request: turns the engine's deltas of all its choices into text events.

Independent of HTTP. Each choice is a small state machine (`ChoiceText`) fed with deltas. It handles stop strings,
characters split over tokens, and log-probabilities.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from penstock.core.errors import EngineError
from penstock.core.types.requests import Delta, FinishReason, PromptLogprobs, Request, TokenLogprob
from penstock.core.wire import NO_TOKENS, PackedTokens, num_tokens, token_list
from penstock.frontend.metrics import RequestTimer
from penstock.frontend.openai.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from penstock.frontend.parsing.parser import OutputParser
from penstock.frontend.requests.direct_text import ChunkWriter, DirectText
from penstock.frontend.requests.next_turns import Answer, OnAnswer
from penstock.frontend.requests.preprocess import PreparedRequest
from penstock.frontend.text.detokenize import Detokenizer, TextDecoder
from penstock.frontend.text.events import TextEvent
from penstock.frontend.text.prompt_part import PromptPart
from penstock.frontend.text.stops import StopFinder
from penstock.frontend.text.token_text import TokenText
from penstock.runtime.requests.direct_streams import is_direct
from penstock.seams import Hold, RequestDispatcher, RequestStream

_TOKEN_BYTES = 4
_GIVEN_UP = frozenset({FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.PREFILLED})


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
        parser: OutputParser | None = None,
    ) -> None:
        """Start a choice.

        Args:
            index: its place among the answer's choices.
            detokenizer: of the model.
            stops: strings that end it.
            begins_text: as in `Detokenizer.stream`.
            min_tokens: stop strings are not searched in the text of so many tokens at its start.
            parser: reads reasoning and tool calls; None: all text is for the user.
        """
        self._parser = parser
        self.raw = ""
        """The latest event's text before it was parsed."""
        self.index = index
        self._min_tokens = min_tokens if stops else 0
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
            self.raw = text = self.decoder.feed(token_ids)
            if not text:
                return None
            self._decoded += len(text)
            self._given = self._decoded
            return TextEvent(self.index, text)
        tokens_before = self.output_tokens
        self.output_tokens += len(token_ids)
        if delta.finish_reason is FinishReason.STOP and token_ids:
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
        self.raw = text
        if self._parser is not None:
            event = self._parse(self._parser, text, reason, logprobs)
            if self._parser.is_reasoning or (event is not None and event.reasoning and not event.text):
                self.reasoning_tokens = self.output_tokens
            return event
        return TextEvent(self.index, text, reason, logprobs, stopped_by=self._stopped_by())

    def _feed_each(self, delta: Delta) -> TextEvent | None:
        """Convert a delta of several tokens one by one, so that each is counted as reasoning or not; their events go as one."""
        events: list[TextEvent] = []
        raw, packed = "", delta.token_ids
        for index in range(num_tokens(packed)):
            start = index * _TOKEN_BYTES
            is_last = start + _TOKEN_BYTES == len(packed)
            one = Delta(
                request_id=delta.request_id,
                token_ids=PackedTokens(packed[start : start + _TOKEN_BYTES]),
                finish_reason=delta.finish_reason if is_last else None,
                logprobs=delta.logprobs[index : index + 1],
            )
            self.raw = ""
            event = self.feed(one)
            raw += self.raw
            if event is not None:
                events.append(event)
            if self.finished:
                break
        self.raw = raw
        if len(events) < 2:
            return events[0] if events else None
        return TextEvent(
            self.index,
            "".join(event.text for event in events),
            events[-1].finish_reason,
            tuple(logprob for event in events for logprob in event.logprobs),
            reasoning="".join(event.reasoning for event in events),
            calls=[call for event in events for call in event.calls],
            stopped_by=events[-1].stopped_by,
        )

    def _parse(
        self, parser: OutputParser, text: str, reason: str | None, logprobs: tuple[TokenText, ...]
    ) -> TextEvent | None:
        parsed = parser.feed(text)
        content, reasoning, calls = parsed.content, parsed.reasoning, parsed.calls
        if reason is not None:
            rest = parser.finish()
            content, reasoning, calls = content + rest.content, reasoning + rest.reasoning, calls + rest.calls
            if reason == "stop" and parser.num_calls:
                reason = "tool_calls"
        elif not (content or reasoning or calls or logprobs):
            return None
        return TextEvent(
            self.index,
            content,
            reason,
            logprobs,
            reasoning=reasoning,
            calls=calls,
            stopped_by=self._stopped_by(),
        )

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
        return stopped, text

    def _take_logprobs(self, before: int | None) -> tuple[TokenText, ...]:
        waiting, taken = self._waiting, []
        while waiting and (before is None or waiting[0].start < before):
            taken.append(waiting.popleft())
        return tuple(taken)


class PromptedChoice(ChoiceText):
    """A choice whose answer says something of its prompt, or has no tokens of its own. Not thread-safe; one task owns it."""

    def say(self, prompt: PromptPart | None, *, drops_output: bool) -> None:
        """Say this of the prompt, with the log-probabilities to come, in the first event; drop the engine's tokens, or not."""
        self._prompt, self._drops_output = prompt, drops_output
        self._logprobs: list[PromptLogprobs] = []
        self._decoded = self._given = 0 if prompt is None else len(prompt.text)
        self._is_plain = False
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
        plain = not (prepared.stops or prepared.prompts or prepared.drops_output)
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
        except ExceptionGroup as errors:
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
            event = choice.feed(delta)
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
        if not choice.finished:
            raise EngineError("the worker's stream ended without a finish reason; try again")

    def _explained(self, request: Request) -> Sequence[object]:
        """Give the routing decisions so far. Read at the start and at the end: retries add decisions, and the dispatcher forgets old ones."""
        return self._dispatcher.explain(request.request_id) if self._explains else ()
