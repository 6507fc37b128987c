"""Request bodies of the Responses API, as far as Penstock serves it."""

from typing import Any

import msgspec

from penstock.frontend.openai.agents import AgentHintsBody, PeerBody, SessionBody
from penstock.frontend.openai.bodies import SamplingExtensions

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""
ENCRYPTED = "reasoning.encrypted_content"
"""Value of `include` that asks for reasoning as one opaque text, which is all that some clients send back of it."""


class InputPart(msgspec.Struct, kw_only=True):
    """A part of an item's content; unknown fields, such as `annotations`, are ignored."""

    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """Any item of the input; unknown fields, such as `status`, are ignored."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: Any = None
    input: str = ""
    output: Any = None
    summary: list[InputPart] | None = None  # of reasoning
    encrypted_content: str | None = None  # of reasoning
    action: Any = None  # of local_shell_call, shell_call and computer_call
    operation: Any = None  # of apply_patch_call
    tools: list[dict[str, Any]] | None = None  # of tool_search_output and additional_tools


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None  # accepted, no effect: reasoning is given as it is


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: Any = None
    strict: Any = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingExtensions, kw_only=True):
    """Body of `/v1/responses`."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    include: Any = None  # `LOGPROBS` and `ENCRYPTED` have an effect, nothing else
    # Accepted, no effect but that the answer repeats them.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    # Accepted, no effect on the answer.
    stream_options: Any = None
    service_tier: Any = None
    strict: bool | None = None
    # Penstock's, as in chats.
    chat_template_kwargs: dict[str, Any] | None = None
    session: SessionBody | None = None
    agent_hints: AgentHintsBody | None = None
    nvext: PeerBody | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Says that a kept answer is deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


decode_responses = msgspec.json.Decoder(ResponsesRequest).decode
