"""llama.cpp's own `POST /completion`: token ids in and out, which its `/v1/completions` does not have.

Source: tools/server/README.md of llama.cpp, and `to_json_non_oaicompat` of its server-task.cpp, at build 10605.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.types.requests import FinishReason, Request, TokenLogprob
from penstock.engine.openai.apis.api import (
    AnswerPiece,
    ServerError,
    TokenId,
    decode,
    garbage,
    is_end,
    reported,
    seed_of,
    sse_data,
    stream_error,
    tokens_left,
    top_of,
)


class LlamaCpp:
    """llama.cpp's native API. Its defaults are not the usual ones, so every field is sent."""

    path = "/completion"
    headers: Mapping[str, str] = {}
    takes_ids = True
    gives_ids = True
    constrains = False

    def body(self, request: Request, prompt: Sequence[int] | str) -> dict[str, Any]:
        """Make the JSON of a streamed request."""
        sampling = request.sampling
        if request.sampling.min_tokens > request.num_emitted:
            raise RequestError("min_tokens: llama.cpp has no such field; leave it out", param="min_tokens")
        if sampling.stop_token_ids:
            raise RequestError(
                "stop_token_ids: llama.cpp has no such field; use stop", param="stop_token_ids"
            )
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": tokens_left(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repeat_penalty": sampling.repetition_penalty,
            "ignore_eos": sampling.ignore_eos,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        if (seed := seed_of(request)) is not None:
            body["seed"] = seed & 0xFFFFFFFF
        if sampling.logprobs is not None:
            body["n_probs"] = max(sampling.logprobs, 1)
        if request.adapter is not None:
            raise RequestError("model: this worker's llama.cpp has no adapters by name", param="model")
        return body

    def answer(self, request: Request) -> "LlamaCppAnswer":
        return LlamaCppAnswer(request)


class LlamaCppAnswer:
    """Reads llama.cpp's stream."""

    def __init__(self, request: Request) -> None:
        self._count = request.sampling.logprobs

    def read(self, line: bytes) -> AnswerPiece | None:
        if line.startswith(b"error:"):
            raise stream_error(line[len(b"error:") :].decode("utf-8", "replace").strip())
        data = sse_data(line)
        if data is None:
            return AnswerPiece(is_last=True) if is_end(line) else None
        chunk = decode(_chunks, data)
        if chunk.error is not None:
            raise reported(chunk.error)
        if chunk.stop is None:
            raise garbage(data, "no stop")
        reason = None
        if chunk.stop:
            reason = FinishReason.LENGTH if chunk.stop_type == "limit" else FinishReason.STOP
        cached = chunk.timings.cache_n if chunk.timings is not None else None
        return AnswerPiece(
            tuple(chunk.tokens), "", reason, cached, self._read_logprobs(chunk), is_last=chunk.stop
        )

    def _read_logprobs(self, chunk: "_Chunk") -> tuple[TokenLogprob, ...]:
        if self._count is None or len(chunk.completion_probabilities) != len(chunk.tokens):
            return ()
        return tuple(
            TokenLogprob(
                each.id,
                max(each.logprob, -9999.0),
                top_of([(t.id, t.logprob) for t in each.top_logprobs], self._count),
            )
            for each in chunk.completion_probabilities
        )


class _Top(msgspec.Struct):
    id: TokenId
    logprob: float


class _Probability(msgspec.Struct):
    id: TokenId
    logprob: float
    top_logprobs: list[_Top] = []


class _Timings(msgspec.Struct):
    cache_n: int | None = None


class _Chunk(msgspec.Struct):
    stop: bool | None = None
    tokens: list[TokenId] = []
    stop_type: str = ""
    timings: _Timings | None = None
    completion_probabilities: list[_Probability] = []
    error: ServerError | str | None = None


_chunks = msgspec.json.Decoder(_Chunk)
