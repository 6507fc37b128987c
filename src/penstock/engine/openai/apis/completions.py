"""`POST /v1/completions`: vLLM (and NIM), TensorRT-LLM, another deployment of Penstock, and any other server.

Penstock, vLLM and TensorRT-LLM take token ids and return them on request. Other servers take and return text, and get only OpenAI's fields.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from penstock.core.errors import EngineError, RequestError
from penstock.core.types.requests import Request, TokenLogprob
from penstock.engine.openai.apis.api import (
    AnswerPiece,
    ServerError,
    TokenId,
    changed,
    client_salt,
    decode,
    finish_of,
    garbage,
    is_end,
    min_tokens_left,
    reported,
    seed_of,
    sse_data,
    tokens_left,
    top_of,
)

_ID = "token_id:"
_ID_DIGITS_MAX = 10
"""Fewer digits than this fit into 31 bits."""


class Completions:
    """OpenAI's completions, in one of four dialects: `vllm`, `trtllm`, `penstock` or `text`."""

    path = "/v1/completions"

    def __init__(self, model: str, dialect: str) -> None:
        """Make it for a server that calls the model `model`."""
        self.model = model
        self.dialect = dialect
        self.takes_ids = self.gives_ids = dialect != "text"
        self.constrains = dialect in {"vllm", "penstock"}
        self.headers = {"X-Penstock-Forwarded": "1"} if dialect == "penstock" else {}

    def body(self, request: Request, prompt: Sequence[int] | str) -> dict[str, Any]:
        """Make the JSON of a streamed request."""
        return {
            **self.whole_body(request, prompt),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def whole_body(self, request: Request, prompt: Sequence[int] | str) -> dict[str, Any]:
        """Make the JSON of a request whose answer is not streamed."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": request.adapter or self.model,
            "prompt": prompt,
            "max_tokens": tokens_left(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **changed(sampling, presence_penalty="presence_penalty", frequency_penalty="frequency_penalty"),
        }
        if (seed := seed_of(request)) is not None:
            body["seed"] = seed
        if not self.gives_ids:
            if sampling.logprobs is not None:
                raise RequestError(
                    "logprobs: this model's server gives none by token id; leave them out", param="logprobs"
                )
            body |= changed(sampling, top_k="top_k", min_p="min_p", ignore_eos="ignore_eos")
            return body
        body["min_tokens"] = min_tokens_left(request)
        body["stop_token_ids"] = list(sampling.stop_token_ids)
        body |= changed(
            sampling,
            top_k="top_k",
            min_p="min_p",
            repetition_penalty="repetition_penalty",
            ignore_eos="ignore_eos",
        )
        if sampling.logprobs is not None:
            body["logprobs"] = sampling.logprobs
        if self.dialect == "penstock":
            body |= _exactly(request)
        if self.constrains:
            body["return_token_ids"] = True
            if sampling.logprobs is not None:
                body["return_tokens_as_token_ids"] = True
            if (salt := client_salt(request)) is not None:
                body["cache_salt"] = _short(salt) if self.dialect == "penstock" else salt
            if sampling.logit_bias:
                body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
            if sampling.allowed_token_ids:
                body["allowed_token_ids"] = list(sampling.allowed_token_ids)
            if sampling.structured is not None:
                body["structured_outputs"] = (
                    msgspec.Raw(sampling.structured)
                    if self.dialect == "penstock"
                    else _constraint(request, sampling.structured)
                )
        else:
            body["detokenize"] = False
        return body

    def answer(self, request: Request) -> "CompletionsAnswer":
        return CompletionsAnswer(request, gives_ids=self.gives_ids)


class CompletionsAnswer:
    """Reads a stream of completions."""

    def __init__(self, request: Request, *, gives_ids: bool) -> None:
        self._gives_ids = gives_ids
        self._logprobs = request.sampling.logprobs

    def read(self, line: bytes) -> AnswerPiece | None:
        data = sse_data(line)
        if data is None:
            return AnswerPiece(is_last=True) if is_end(line) else None
        chunk = decode(_chunks, data)
        if chunk.error is not None:
            raise reported(chunk.error)
        cached = chunk.usage.cached_tokens if chunk.usage is not None else None
        if not chunk.choices:
            return None if cached is None else AnswerPiece(cached_tokens=cached)
        choice = chunk.choices[0]
        if self._gives_ids and choice.token_ids is None and choice.text:
            raise garbage(data, "text without token_ids")
        token_ids = tuple(choice.token_ids or ())
        return AnswerPiece(
            token_ids=token_ids,
            text="" if self._gives_ids or choice.text is None else choice.text,
            finish_reason=finish_of(choice.finish_reason),
            cached_tokens=cached,
            logprobs=self._read_logprobs(choice.logprobs, token_ids),
        )

    def _read_logprobs(self, found: "_Logprobs | None", token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        if found is None or self._logprobs is None:
            return ()
        count, result = self._logprobs, []
        for index, token_id in enumerate(token_ids[: len(found.token_logprobs)]):
            top = (
                found.top_logprobs[index] if found.top_logprobs and index < len(found.top_logprobs) else None
            )
            pairs = [
                (int(name.removeprefix(_ID)), value) for name, value in (top or {}).items() if _is_id(name)
            ]
            logprob = found.token_logprobs[index]
            result.append(
                TokenLogprob(token_id, -9999.0 if logprob is None else logprob, top_of(pairs, count))
            )
        return tuple(result)


def _short(salt: str) -> str:
    """Shorten a salt to what every deployment takes: a tenant's is before the client's own."""
    return blake2b(salt.encode(), digest_size=16).hexdigest()


def _exactly(request: Request) -> dict[str, Any]:
    """Give what has another deployment answer as a worker of this one would: with its seed, from its place on."""
    sampling = request.sampling
    return {
        "seed": sampling.seed,
        "continuation": {"num_emitted": request.num_emitted, "choice": request.choice},
        "priority": -request.priority,  # lower values come first there
        "top_k": sampling.top_k or 0,  # said even where they are off, or the model's own defaults would hold
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }


def _constraint(request: Request, structured: bytes) -> msgspec.Raw:
    """Give the body's `structured_outputs`.

    Raises:
        EngineError: the answer has begun, and the server cannot go on within it.
    """
    if request.num_emitted:
        raise EngineError(
            f"request {request.request_id}: its worker was lost after {request.num_emitted} tokens, and vLLM cannot continue an"
            " answer that response_format constrains; send it again"
        )
    return msgspec.Raw(structured)


def _is_id(name: str) -> bool:
    number = name.removeprefix(_ID)
    return name.startswith(_ID) and len(number) < _ID_DIGITS_MAX and number.isdecimal()


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: ServerError | str | None = None


_chunks = msgspec.json.Decoder(_Chunk)
