"""The text of one choice: stop strings, characters split over tokens, log-probabilities, and an echoed prompt."""

import dataclasses
from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.core.errors import EngineError
from penstock.core.types.requests import Delta, FinishReason, PromptLogprobs, TokenLogprob
from penstock.core.wire import NO_TOKENS, PackedTokens, num_tokens, token_list
from penstock.frontend.parsing.parser import OutputParser
from penstock.frontend.parsing.source import Repair
from penstock.frontend.text.detokenize import Detokenizer, TextDecoder
from penstock.frontend.text.events import TextEvent, merged
from penstock.frontend.text.prompt_part import PromptPart
from penstock.frontend.text.stops import StopFinder
from penstock.frontend.text.token_text import TokenText

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
        self.raw = ""
        """The latest event's text before it was parsed."""
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
            self.raw = text = self.decoder.feed(token_ids)
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
        """Say this of the prompt, with the log-probabilities to come, in the first event; drop the engine's tokens, or not."""
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
