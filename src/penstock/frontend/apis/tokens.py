"""Bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.apis.bodies import ChatRequest, CompletionRequest, Message, StrictBody
from penstock.frontend.apis.decoding import parse_body
from penstock.frontend.apis.dialect import ApiDialect, ParsedBody
from penstock.frontend.errors import BodySizeError

TOKENS_MAX = 1 << 18
DETOKENIZE_BYTES_MAX = 1 << 20
"""Of a body of token ids, which is decoded beside the event loop with the GIL held: 60 ms of the worst JSON."""


class TokenizeRequest(StrictBody, kw_only=True):
    """A text, or a chat as its template renders it."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Any = None  # accepted, no effect
    strict: bool | None = None


class DetokenizeRequest(StrictBody, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str = ""
    strict: bool | None = None


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None = None


class Detokenized(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    """What clients that tokenize by this server ask of its tokenizer, by the names of tokenizer_config.json."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None


_decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode
_decode_detokenize = msgspec.json.Decoder(DetokenizeRequest).decode


def parse_tokenize(body: bytes) -> ParsedBody:
    """Decode a body of `/tokenize`.

    Raises:
        RequestError: it is malformed, or has not one of `prompt` and `messages`.
    """
    given = parse_body(body, TokenizeRequest, _decode_tokenize)
    if (given.prompt is None) == (given.messages is None):
        raise RequestError("expected either prompt or messages; send one of them", field="prompt")
    if given.messages is None:
        return ParsedBody(
            CompletionRequest(
                model=given.model, prompt=given.prompt or "", add_special_tokens=given.add_special_tokens
            )
        )
    return ParsedBody(
        ChatRequest(
            model=given.model,
            messages=given.messages,
            add_special_tokens=given.add_special_tokens,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=given.continue_final_message,
            tools=given.tools,
            chat_template_kwargs=given.chat_template_kwargs,
        )
    )


TOKENIZE = ApiDialect("tokenize", "tok-", parse_tokenize)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Decode a body of `/detokenize`.

    Raises:
        BodySizeError: it is too large.
        RequestError: it is malformed, or has too many ids.
    """
    if len(body) > DETOKENIZE_BYTES_MAX:
        raise BodySizeError(
            f"the body has {len(body)} bytes, at most {DETOKENIZE_BYTES_MAX} are allowed here; send fewer tokens at once"
        )
    given = parse_body(body, DetokenizeRequest, _decode_detokenize)
    if len(given.tokens) > TOKENS_MAX:
        raise RequestError(f"at most {TOKENS_MAX} ids are allowed, got {len(given.tokens)}", field="tokens")
    return given
