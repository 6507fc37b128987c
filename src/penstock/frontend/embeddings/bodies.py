"""Bodies of `/v1/embeddings`."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.client_fields import ClientFields
from penstock.frontend.openai.bodies import Body, CompletionRequest, parse_body
from penstock.frontend.openai.dialect import EmbeddingOptions, ParsedBody
from penstock.frontend.openai.validation import check_completion

INPUTS_MAX = 2048  # OpenAI's
_FORMATS = ("float", "base64")
_FIELDS = ClientFields(names={"prompt": "input", "token_ids": "input"})


class EmbeddingsRequest(Body, kw_only=True):
    """One or more inputs, each a text or token ids."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    # Penstock's, as in completions.
    cache_salt: str | None = None
    priority: int | None = None
    add_special_tokens: bool | None = None
    strict: bool | None = None
    # Accepted, no effect on the answer.
    user: Any = None


class Embedding(msgspec.Struct):
    index: int
    embedding: str | list[float]
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


_decode = msgspec.json.Decoder(EmbeddingsRequest).decode


def parse_embeddings(body: bytes) -> ParsedBody:
    """Decode a body.

    Raises:
        RequestError: it is malformed.
    """
    given = parse_body(body, EmbeddingsRequest, _decode)
    if given.encoding_format is not None and given.encoding_format not in _FORMATS:
        raise RequestError(
            f"encoding_format: must be one of {', '.join(_FORMATS)}, got {given.encoding_format[:40]!r}",
            param="encoding_format",
        )
    if given.dimensions is not None and given.dimensions < 1:
        raise RequestError(f"dimensions: must be >= 1, got {given.dimensions}", param="dimensions")
    request = CompletionRequest(
        model=given.model,
        prompt=given.input,
        max_tokens=1,
        temperature=0.0,
        cache_salt=given.cache_salt,
        priority=given.priority,
        add_special_tokens=given.add_special_tokens,
    )
    return ParsedBody(
        request,
        embedding=EmbeddingOptions(given.encoding_format == "base64", given.dimensions),
        fields=_FIELDS,
    )


def check_embeddings(parsed: ParsedBody, _choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range."""
    request = parsed.request
    assert isinstance(request, CompletionRequest)
    inputs = request.prompt
    if isinstance(inputs, list) and len(inputs) > INPUTS_MAX and not isinstance(inputs[0], int):
        raise RequestError(
            f"input: at most {INPUTS_MAX} inputs are allowed, got {len(inputs)}; send several requests",
            param="input",
        )
    check_completion(request, INPUTS_MAX)
