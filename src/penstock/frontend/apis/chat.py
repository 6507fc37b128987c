"""Answers of chats and text completions, streamed or whole. The constant parts of a choice's chunks are encoded once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any, Generic, TypeVar

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.json_text import encode_json
from penstock.core.types.requests import TokenLogprob
from penstock.core.wire import token_list
from penstock.frontend.apis.bodies import CompletionRequest, parse_chat, parse_completion
from penstock.frontend.apis.dialect import (
    AnswerContext,
    ApiDialect,
    Envelope,
    ParsedBody,
    TokenBytes,
    Usage,
    names_of,
)
from penstock.frontend.errors import ClientFields, error_answer
from penstock.frontend.text.answer import PromptPart, TextEvent, TokenText
from penstock.frontend.text.source import CallDelta

Choice = TypeVar("Choice")


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(msgspec.Struct):
    """One token of a chat answer's `logprobs.content`."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenEntry]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Of each token; None for the first one of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """A token at a place of the prompt, by vLLM's names; ranks begin at 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[int, PromptLogprob] | None]
"""For each prompt token that token and the most likely ones, by id; None for the first."""


class RoutingDecisions(msgspec.Struct):
    """Routing decisions, oldest first."""

    decisions: Sequence[Any]


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    """`content` is null where there are tool calls and no text; reasoning has the names of vLLM now and of older servers."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    prompt_logprobs: PromptLogprobList | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class OpenAiAnswer(msgspec.Struct, Generic[Choice], omit_defaults=True):
    """A whole chat.completion or text_completion. `penstock` holds the routing decisions if the client asked for them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    penstock: RoutingDecisions | None = None
    prompt_logprobs: PromptLogprobList | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ModelEntry(msgspec.Struct, kw_only=True):
    """A model, or a LoRA adapter of its `parent`; `max_model_len` is its context length. Both names are vLLM's.

    `type`, `display_name` and `created_at` are those of Anthropic's API.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int
    parent: str | None = None
    type: str = "model"
    display_name: str
    created_at: str


class ModelList(msgspec.Struct, kw_only=True):
    """All models; what is beside `data` is Anthropic's."""

    object: str = "list"
    data: list[ModelEntry]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


DONE = b"data: [DONE]\n\n"
_END = b"}\n\n"


class EventStream:
    """Encodes one answer's events as server-sent events."""

    def __init__(
        self,
        envelope: Envelope,
        token_bytes: TokenBytes,
        *,
        include_usage: bool,
        usage_so_far: Callable[[], Usage] | None = None,
        before: bytes = b"",
    ) -> None:
        """Encode the constant parts of all chunks.

        Args:
            envelope: the answer's shared fields.
            token_bytes: gives a token's bytes, for log-probabilities.
            include_usage: every chunk has a null `usage`, and the last one the counts.
            usage_so_far: gives the counts for each chunk, instead of null.
            before: encoded events before the first chunk.
        """
        self._before = before
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far
        kind = "chat.completion.chunk" if envelope.chat else "text_completion"
        head = {"id": envelope.id, "object": kind, "created": envelope.created, "model": envelope.model}
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._before_text = b',"delta":{"content":' if envelope.chat else b',"text":'
        self._after_text = b'},"logprobs":' if envelope.chat else b',"logprobs":'
        self._tail = (b'],"usage":null' if include_usage else b"]") + _END
        self._plain_tail = self._after_text + b'null,"finish_reason":null}' + self._tail
        self._starts: dict[int, bytes] = {}
        self._envelope = envelope
        self._chat = envelope.chat
        self._token_bytes = token_bytes

    def event(self, event: TextEvent) -> bytes:
        """Encode an event as one chunk; a chat choice's first chunk is preceded by one with its role."""
        start = self._starts.get(event.index)
        role = b""
        if start is None:
            start = self._head + b'{"index":%d' % event.index + self._before_text
            self._starts[event.index] = start
            role = self._role(event.index) if self._chat else b""
            role, self._before = self._before + role, b""
            if event.prompt is not None and not (event.reasoning or event.calls):
                return role + self._prompted(start, event, event.prompt)
        if event.reasoning or event.calls:
            return role + self._parsed(event)
        if (
            event.finish_reason is None
            and not event.logprobs
            and event.token_ids is None
            and self._usage_so_far is None
        ):
            return role + start + encode_json(event.text) + self._plain_tail
        return role + start + encode_json(event.text) + self._after(event)

    def _prompted(self, start: bytes, event: TextEvent, prompt: PromptPart) -> bytes:
        """Encode the first event of a choice with its prompt before it, as one chunk."""
        logprobs = (*prompt.echoed_tokens(), *event.logprobs)
        event = msgspec.structs.replace(event, logprobs=logprobs)
        return start + encode_json(prompt.text + event.text) + self._after(event)

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """Give the bytes before and after the text, a JSON string, of a choice's chunks that have nothing else; None before its first one."""
        start = self._starts.get(index)
        return None if start is None or self._usage_so_far is not None else (start, self._plain_tail)

    def _parsed(self, event: TextEvent) -> bytes:
        """Encode an event with reasoning or tool calls, as one chunk."""
        delta: dict[str, Any] = {}
        if event.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = event.reasoning
        if event.text:
            delta["content"] = event.text
        if event.calls:
            delta["tool_calls"] = [self._call(event.index, call) for call in event.calls]
        start = self._head + b'{"index":%d,"delta":' % event.index
        return start + encode_json(delta)[:-1] + self._after(event)

    def _call(self, choice: int, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        call_id = self._envelope.call_id(choice, call.index)
        return {"index": call.index, "id": call_id, "type": "function", "function": function}

    def _after(self, event: TextEvent) -> bytes:
        """Encode what follows the text in a chunk."""
        logprobs = encode_json(_logprobs(event.logprobs, self._token_bytes, chat=self._chat))
        reason = b',"finish_reason":' + encode_json(event.finish_reason)
        if event.token_ids is not None:
            reason += b',"token_ids":' + encode_json(event.token_ids)
        tail = b"}" + self._tail_now()
        if event.prompt is not None and event.prompt.gives_ids:
            place = 2 if self._chat else 0  # of a chat they are beside its choices
            tail = (
                tail[:place]
                + b',"prompt_token_ids":'
                + encode_json(token_list(event.prompt.token_ids))
                + tail[place:]
            )
        if event.decisions:
            tail = (
                tail[: -len(_END)] + b',"penstock":' + encode_json(RoutingDecisions(event.decisions)) + _END
            )
        return self._after_text + logprobs + reason + tail

    def end(self, usage: Usage) -> bytes:
        """Encode what ends the stream: with `include_usage` a chunk without choices, then `[DONE]`."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + encode_json(usage) + _END + DONE

    def failure(self, error: PenstockError) -> bytes:
        """Encode the error event that ends a stream; no [DONE] follows."""
        return b"data: " + encode_json(error_answer(error)) + b"\n\n"

    def _role(self, index: int) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""'
        end = b'},"logprobs":null,"finish_reason":null}' + self._tail_now()
        return self._head + b'{"index":%d' % index + delta + end

    def _tail_now(self) -> bytes:
        if self._usage_so_far is None:
            return self._tail
        return b'],"usage":' + encode_json(self._usage_so_far()) + _END


@dataclass(slots=True)
class _Collected:
    pieces: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CalledFunction] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    finish_reason: str = "stop"
    prompt: PromptPart | None = None
    token_ids: list[int] | None = None


class WholeAnswer:
    """Collects the events of an answer that is sent as one body."""

    def __init__(
        self,
        envelope: Envelope,
        token_bytes: TokenBytes,
        *,
        choices: int,
        logprobs: bool,
        best: tuple[int, int] | None = None,
    ) -> None:
        """Begin without events.

        Args:
            envelope: the answer's shared fields.
            token_bytes: gives a token's bytes, for log-probabilities.
            choices: how many are made.
            logprobs: whether choices show log-probabilities.
            best: (n, m): of m choices for a prompt, the n most likely ones are given, by the mean of their tokens'
                log-probabilities. None: all.
        """
        self._best = best
        self._envelope = envelope
        self._token_bytes = token_bytes
        self._wants_logprobs = logprobs
        self._choices = [_Collected() for _ in range(choices)]
        self._decisions: list[object] = []

    def take(self, event: TextEvent) -> None:
        collected = self._choices[event.index]
        if event.prompt is not None:
            collected.prompt = event.prompt
        collected.pieces.append(event.text)
        if event.token_ids is not None:
            if collected.token_ids is None:
                collected.token_ids = []
            collected.token_ids += event.token_ids
        collected.logprobs += event.logprobs
        if event.reasoning:
            collected.reasoning.append(event.reasoning)
        for call in event.calls:
            if call.name is not None:
                collected.calls.append(CalledFunction(call.name, ""))
            collected.calls[call.index].arguments += call.arguments
        if event.cuts_call:
            collected.calls.pop()
        self._decisions += event.decisions
        if event.finish_reason is not None:
            collected.finish_reason = event.finish_reason

    def body(self, usage: Usage) -> bytes:
        envelope, choices = self._envelope, self._given()
        kind = "chat.completion" if envelope.chat else "text_completion"
        build: Any = self._chat_choice if envelope.chat else self._completion_choice
        return encode_json(
            OpenAiAnswer(
                id=envelope.id,
                object=kind,
                created=envelope.created,
                model=envelope.model,
                choices=[build(index, collected) for index, collected in enumerate(choices)],
                usage=usage,
                penstock=RoutingDecisions(self._decisions) if self._decisions else None,
                prompt_logprobs=self._listed(choices[0]) if envelope.chat else msgspec.UNSET,
                prompt_token_ids=_prompt_ids(choices[0]) if envelope.chat else msgspec.UNSET,
            )
        )

    def _given(self) -> list[_Collected]:
        if self._best is None:
            return self._choices
        kept, made = self._best
        prompts = (self._choices[start : start + made] for start in range(0, len(self._choices), made))
        return [choice for each in prompts for choice in sorted(each, key=_mean_logprob, reverse=True)[:kept]]

    def _chat_choice(self, index: int, collected: _Collected) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=self._message(index, collected),
            logprobs=_chat_logprobs(collected.logprobs, self._token_bytes) if self._wants_logprobs else None,
            finish_reason=collected.finish_reason,
            token_ids=_unless_none(collected.token_ids),
        )

    def _message(self, index: int, collected: _Collected) -> AssistantMessage:
        calls = [
            ToolCall(id=self._envelope.call_id(index, number), function=function)
            for number, function in enumerate(collected.calls)
        ]
        text, reasoning = "".join(collected.pieces), "".join(collected.reasoning) or msgspec.UNSET
        return AssistantMessage(
            content=None if calls and not text else text,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or msgspec.UNSET,
        )

    def _completion_choice(self, index: int, collected: _Collected) -> CompletionChoice:
        prompt, logprobs = collected.prompt, collected.logprobs
        if prompt is not None:
            logprobs = prompt.echoed_tokens() + logprobs
        return CompletionChoice(
            index=index,
            text="".join(("" if prompt is None else prompt.text, *collected.pieces)),
            logprobs=_completion_logprobs(logprobs, self._token_bytes) if self._wants_logprobs else None,
            finish_reason=collected.finish_reason,
            prompt_logprobs=self._listed(collected),
            token_ids=_unless_none(collected.token_ids),
            prompt_token_ids=_prompt_ids(collected),
        )

    def _listed(self, collected: _Collected) -> PromptLogprobList | msgspec.UnsetType:
        """Give the log-probabilities of a choice's prompt, if they were asked for."""
        prompt = collected.prompt
        if prompt is None or prompt.listed is None:
            return msgspec.UNSET
        listed: PromptLogprobList = [None]
        for token in prompt.tokens(prompt.listed):
            at = {token.token_id: self._listing(token.token_id, token.logprob, token.rank)}
            for rank, (token_id, value) in enumerate(token.top, 1):
                at.setdefault(token_id, self._listing(token_id, value, rank))
            listed.append(at)
        return listed

    def _listing(self, token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(_finite(logprob), rank, _text(self._token_bytes(token_id)))


def _prompt_ids(collected: _Collected) -> list[int] | msgspec.UnsetType:
    prompt = collected.prompt
    return token_list(prompt.token_ids) if prompt is not None and prompt.gives_ids else msgspec.UNSET


def _unless_none(token_ids: list[int] | None) -> list[int] | msgspec.UnsetType:
    return msgspec.UNSET if token_ids is None else token_ids


def _mean_logprob(choice: _Collected) -> float:
    values = [token.logprob.logprob for token in choice.logprobs]
    return sum(values) / len(values) if values else -inf  # an empty answer is nobody's best


def _logprobs(tokens: tuple[TokenText, ...], token_bytes: TokenBytes, *, chat: bool) -> msgspec.Struct | None:
    if not tokens:
        return None
    return _chat_logprobs(tokens, token_bytes) if chat else _completion_logprobs(tokens, token_bytes)


def _chat_logprobs(tokens: tuple[TokenText, ...] | list[TokenText], token_bytes: TokenBytes) -> ChatLogprobs:
    return ChatLogprobs([token_entry(token.logprob, token_bytes) for token in tokens])


def token_entry(logprob: TokenLogprob, token_bytes: TokenBytes) -> TokenEntry:
    """Give a token's log-probability as chats and the Responses API have it."""
    top = [TopLogprob(*_named(token_id, value, token_bytes)) for token_id, value in logprob.top]
    return TokenEntry(*_named(logprob.token_id, logprob.logprob, token_bytes), top)


def _named(token_id: int, logprob: float, token_bytes: TokenBytes) -> tuple[str, float, list[int]]:
    content = token_bytes(token_id)
    return _text(content), _finite(logprob), list(content)


def _completion_logprobs(
    tokens: tuple[TokenText, ...] | list[TokenText], token_bytes: TokenBytes
) -> CompletionLogprobs:
    wants_top = any(token.logprob.top for token in tokens)
    return CompletionLogprobs(
        tokens=[_text(token_bytes(token.logprob.token_id)) for token in tokens],
        token_logprobs=[
            None if isnan(token.logprob.logprob) else _finite(token.logprob.logprob) for token in tokens
        ],
        top_logprobs=[
            None if isnan(token.logprob.logprob) else _top(token.logprob, token_bytes) for token in tokens
        ]
        if wants_top
        else None,
        text_offset=[token.start for token in tokens],
    )


def _top(logprob: TokenLogprob, token_bytes: TokenBytes) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, value in logprob.top:
        top.setdefault(_text(token_bytes(token_id)), _finite(value))  # partial characters have equal texts
    return top


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    """Replace -inf, which JSON lacks, by the API's lowest value."""
    return max(logprob, -9999.0)


def _parse_chat(body: bytes) -> ParsedBody:
    request = parse_chat(body)
    return ParsedBody(request, fields=ClientFields(names=names_of(request)))


def _parse_completion(body: bytes) -> ParsedBody:
    request = parse_completion(body)
    return ParsedBody(request, fields=ClientFields(names=names_of(request)))


def _token_names(context: AnswerContext) -> TokenBytes:
    return _named_by_id if context.request.return_tokens_as_token_ids else context.token_bytes


def _named_by_id(token_id: int) -> bytes:
    """Name a token of log-probabilities by its id, as vLLM does."""
    return b"token_id:%d" % token_id


def _stream(context: AnswerContext) -> EventStream:
    options = context.request.stream_options
    include_usage = options is not None and bool(options.include_usage)
    return EventStream(
        context.envelope,
        _token_names(context),
        include_usage=include_usage,
        usage_so_far=context.usage
        if include_usage and options is not None and options.continuous_usage_stats
        else None,
        before=context.annotations,
    )


def _whole(context: AnswerContext) -> WholeAnswer:
    request, logprobs, best = context.request, context.logprobs, None
    if isinstance(request, CompletionRequest) and request.answers_per_prompt > (request.n or 1):
        best, logprobs = (request.n or 1, request.answers_per_prompt), request.logprobs is not None
    return WholeAnswer(
        context.envelope, _token_names(context), choices=context.choices, logprobs=logprobs, best=best
    )


CHAT = ApiDialect("chat", "chatcmpl-", _parse_chat, _stream, _whole)
COMPLETIONS = ApiDialect("completions", "cmpl-", _parse_completion, _stream, _whole)
