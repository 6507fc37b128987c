"""Answers of the OpenAI API: whole bodies, and the parts that streams share with them."""

from typing import Generic, TypeVar

import msgspec

from penstock.core.json_text import encode_json
from penstock.frontend.openai.explaining import Explanation

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


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Counts of an answer; `completion_tokens_details` is there where some of it was reasoning."""

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


class Answer(msgspec.Struct, Generic[Choice], omit_defaults=True):
    """A whole chat.completion or text_completion. `penstock` holds the routing decisions if the client asked for them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    penstock: Explanation | None = None
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


encode = encode_json
