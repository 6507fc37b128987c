"""Request and response bodies of the OpenAI API, as far as Penstock serves it.

Unsupported fields that would change the answer are declared too, so that a request with one is refused by name
(`validation.py`) and never answered wrongly.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.frontend.openai.agents import AgentHintsBody, PeerBody, RetentionBody, SessionBody
from penstock.frontend.openai.body_error import body_error
from penstock.frontend.openai.explaining import Explanation
from penstock.frontend.openai.media import ContentPart

STOPS_MAX = 16
STOP_CHARACTERS_MAX = 1024


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies: an unknown field is an error, as at OpenAI."""


class StreamOptions(Body, kw_only=True):
    include_usage: bool = False
    include_obfuscation: Any = None  # accepted, no effect


class GenerationRequest(Body, kw_only=True):
    """Fields of both chat and text completions. None: not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    response_format: Any = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Extensions, with the names vLLM and SGLang use.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    structured_outputs: Any = None
    # What agents say (`agents.py`).
    session: SessionBody | None = None
    kv_retention: RetentionBody | None = None
    agent_hints: AgentHintsBody | None = None
    nvext: PeerBody | None = None
    # Accepted, no effect on the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # Refused unless they ask for nothing.
    logit_bias: Any = None


class Message(msgspec.Struct, kw_only=True):
    """One message; fields copied from an earlier answer, such as `refusal`, are ignored."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: Any = None
    # Refused unless they ask for nothing.
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    # Refused unless they ask for nothing.
    echo: Any = None
    best_of: Any = None
    suffix: Any = None


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
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class Answer(msgspec.Struct, omit_defaults=True):
    """A whole chat.completion or text_completion. `penstock` holds the routing decisions if the client asked for them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[CompletionChoice]
    usage: Usage
    penstock: Explanation | None = None


class ModelEntry(msgspec.Struct, kw_only=True):
    """A model, or a LoRA adapter of its `parent`; `max_model_len` is its context length. Both names are vLLM's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelEntry]


encode = msgspec.json.Encoder().encode
_decode_chat = msgspec.json.Decoder(ChatRequest).decode
_decode_completion = msgspec.json.Decoder(CompletionRequest).decode


def parse_chat(body: bytes) -> ChatRequest:
    """Decode a chat request; `validation.check_chat` checks its values.

    Raises:
        RequestError: not JSON, a wrong type, a missing or an unknown field.
    """
    try:
        with _no_collections():
            return _decode_chat(body)
    except (ValueError, RecursionError) as error:
        raise body_error(error, body, ChatRequest) from error


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode a completion request; `validation.check_completion` checks its values.

    Raises:
        RequestError: not JSON, a wrong type, a missing or an unknown field.
    """
    try:
        with _no_collections():
            return _decode_completion(body)
    except (ValueError, RecursionError) as error:
        raise body_error(error, body, CompletionRequest) from error


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Pause garbage collection while decoding: it would scan the body's growing lists repeatedly and make decoding 4 times slower."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
