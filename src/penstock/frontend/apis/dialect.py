"""What one API needs beside its routes: a translator of bodies, and two of answers."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.types.requests import SamplingParams
from penstock.core.wire import Wire
from penstock.frontend.apis.bodies import ChatRequest, CompletionRequest, GenerationRequest, Message
from penstock.frontend.apis.checks import check_request
from penstock.frontend.errors import SAME, ClientFields
from penstock.frontend.text.answer import Blocks, TextEvent

TokenBytes = Callable[[int], bytes]
_SHORT_ID = 9  # what Mistral's templates demand


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts of an answer; `completion_tokens_details` is set where some tokens were reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens of reasoning."""
        details = self.completion_tokens_details
        return 0 if isinstance(details, msgspec.UnsetType) else details.reasoning_tokens


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that all chunks of one answer share."""

    id: str
    created: int
    model: str
    chat: bool
    short_call_ids: bool = False

    def call_id(self, choice: int, call: int) -> str:
        """Make the id of a tool call from the answer's id, so that each chunk of a stream names the call alike."""
        digest = hashlib.blake2b(f"{self.id}-{choice}-{call}".encode(), digest_size=12).hexdigest()
        return digest[:_SHORT_ID] if self.short_call_ids else f"call_{digest}"


class EmbeddingOptions(Wire, frozen=True):
    """How embeddings are encoded: base64 of float32, or numbers. `dimensions`: leading values of each embedding; None: all."""

    is_base64: bool = False
    dimensions: int | None = None


class ClientTool(Wire, frozen=True):
    """A tool of the Responses API that the model is told of as a function of another name or form.

    Attributes:
        kind: of the items of its calls: function_call, custom_tool_call or tool_search_call.
        name: as the client has it, without its namespace.
        namespace: "" outside one.
    """

    kind: str
    name: str
    namespace: str = ""


class ResponseFields(Wire, frozen=True):
    """Fields of a body of the Responses API that its answers repeat, where the request for the model lacks them.

    Attributes:
        previous: the stored answer that it continues; its messages go before those of the body.
        instructions: a JSON string or null.
        metadata: a JSON object.
        truncation: "auto" leaves out the oldest messages where all of them are too long for the model.
        summary: of `reasoning`.
        tools: a JSON array.
        tool_choice: JSON.
        client_tools: by their functions' names.
        seals: give reasoning as an opaque text too.
    """

    previous: str | None = None
    instructions: bytes = b"null"
    metadata: bytes = b"{}"
    truncation: str = "disabled"
    summary: str | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    tools: bytes = b"[]"
    tool_choice: bytes = b'"auto"'
    client_tools: dict[str, ClientTool] = msgspec.field(default_factory=dict)
    seals: bool = False


class ParsedBody(msgspec.Struct, frozen=True):
    """A body as the frontend's own request.

    Attributes:
        request: for the model.
        response: what answers of the Responses API repeat of it.
        instructions: leading messages of `request` that stay in front and are not stored.
        stores: whether its messages and the answer are kept, so that another request can continue them.
        embedding: how embeddings are given, where the body asks for them.
        fields: the client's names of the request's fields, for errors.
    """

    request: ChatRequest | CompletionRequest
    response: ResponseFields | None = None
    instructions: int = 0
    stores: bool = False
    embedding: EmbeddingOptions | None = None
    fields: ClientFields = SAME

    @property
    def previous(self) -> str | None:
        """Id of the stored answer that the body continues; the stored messages go before the messages of `request`."""
        return None if self.response is None else self.response.previous

    def fields_now(self) -> ClientFields:
        """Give `fields`, once stored messages may stand before those that the client sent."""
        if not self.fields.messages or not isinstance(self.request, ChatRequest):
            return self.fields
        history = len(self.request.messages) - len(self.fields.messages)
        return self.fields.after(self.instructions, history) if history else self.fields


class AnswerContext(msgspec.Struct, frozen=True):
    """What translators of an answer may use.

    Attributes:
        envelope: fields that all its parts share.
        request: without its prompts, if its body was large.
        token_bytes: gives a token's bytes, for log-probabilities.
        choices: how many the answer has.
        logprobs: whether they were asked for.
        usage: gives the counts so far.
        sampling: of its choices.
        response: what answers of the Responses API repeat of their body.
        remember: keeps the answer's message, and the response object as JSON; None: it is not stored.
        annotations: encoded events before those of a streamed answer.
    """

    envelope: Envelope
    request: GenerationRequest
    token_bytes: TokenBytes
    choices: int
    logprobs: bool
    usage: Callable[[], Usage]
    sampling: SamplingParams
    response: ResponseFields | None = None
    remember: Callable[[Message, bytes], None] | None = None
    annotations: bytes = b""


class StreamedAnswer(Protocol):
    """Encodes an answer as server-sent events."""

    def event(self, event: TextEvent) -> bytes: ...

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """Give the bytes around the text of a choice's events that have nothing else; None while it needs `event`."""
        ...

    def end(self, usage: Usage) -> bytes: ...

    def failure(self, error: PenstockError) -> bytes: ...


class WholeBody(Protocol):
    """Collects an answer that is sent as one body."""

    def take(self, event: TextEvent) -> None: ...

    def body(self, usage: Usage) -> bytes: ...


class WholeBlocks:
    """Collects an answer of one choice as blocks."""

    def __init__(
        self, write: Callable[[AnswerContext, Blocks, Usage], bytes], context: AnswerContext
    ) -> None:
        """Begin without events; `write` encodes the collected answer."""
        self._write = write
        self._context = context
        self._blocks = Blocks()

    def take(self, event: TextEvent) -> None:
        for _ in self._blocks.feed(event):
            pass

    def body(self, usage: Usage) -> bytes:
        return self._write(self._context, self._blocks, usage)


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_SHARED = ("ignore_eos", "top_k", "repetition_penalty")
_PROMPTS = ("prompt", "token_ids")
"""What engines call what they are to continue."""
_CHAT = dict.fromkeys(_PROMPTS, "messages") | {"max_tokens": "max_completion_tokens"}
_COMPLETION = {"token_ids": "prompt"}


def names_of(request: GenerationRequest) -> dict[str, str]:
    """Give the client's names of fields that errors about a request may call otherwise, as in `ClientFields`."""
    names = dict(_COMPLETION)
    if isinstance(request, ChatRequest):
        names = dict(_CHAT)
        if request.max_tokens is not None:
            del names["max_tokens"]
        choice = request.tool_choice
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if request.tools and isinstance(kind, str) and kind in {"required", "function"}:
            names["response_format"] = "tools"
    elif isinstance(request, CompletionRequest) and request.echo and request.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    if request.structured_outputs is not None:
        names.setdefault("response_format", "structured_outputs")
    peer = request.nvext
    for name in _GUIDED:
        if getattr(request, name) is not None:
            ours = name if peer is None or getattr(peer, name) is None else f"nvext.{name}"
            names.setdefault("response_format", ours)
            names |= {"structured_outputs": ours, name: ours}
    if peer is not None:
        names |= {name: f"nvext.{name}" for name in _SHARED if getattr(peer, name) is not None}
        if peer.greed_sampling:
            names["temperature"] = "nvext.greed_sampling"
        if peer.session_control is not None:
            names["session.id"] = "nvext.session_control.session_id"
    return names


@dataclass(frozen=True, slots=True)
class ApiDialect:
    """One API.

    Attributes:
        name: by which encoder processes find it.
        id_prefix: of its answers.
        parse: decodes a body; raises RequestError.
        stream: makes the encoder of a streamed answer; None: the API has no answers of a model's text.
        whole: makes the encoder of a whole answer; None likewise.
        check: checks the request's values, given the most choices allowed; raises RequestError.
    """

    name: str
    id_prefix: str
    parse: Callable[[bytes], ParsedBody]
    stream: Callable[[AnswerContext], StreamedAnswer] | None = None
    whole: Callable[[AnswerContext], WholeBody] | None = None
    check: Callable[[ChatRequest | CompletionRequest, int], None] = check_request
