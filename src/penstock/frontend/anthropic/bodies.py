"""Request bodies of the Anthropic API, as far as Penstock serves it."""

from typing import Any

import msgspec

from penstock.frontend.openai.bodies import SamplingExtensions


class Source(msgspec.Struct, kw_only=True):
    """Where the content of an image or a document is."""

    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: "str | list[ContentBlock] | None" = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """Any block of a message; unknown fields, such as `cache_control` and `signature`, are ignored."""

    type: str
    text: str = ""
    thinking: str = ""
    title: str | None = None
    source: Source | str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    tool_name: str = ""  # of a tool_reference
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None  # accepted, no effect: templates have no such bound
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(SamplingExtensions, kw_only=True):
    """Body of `/v1/messages/count_tokens`: what makes up a prompt."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Accepted, no effect on the answer.
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    strict: bool | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    # Accepted, no effect on the answer.
    metadata: Any = None
    service_tier: Any = None


decode_messages = msgspec.json.Decoder(MessagesRequest).decode
decode_count = msgspec.json.Decoder(CountRequest).decode
