"""Ollama's `POST /api/generate` with `raw`: text in and out. Its `/v1/completions` would put the prompt into a template.

Source: docs/api.md of Ollama, "Generate a completion".
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.types.requests import Request
from penstock.engine.openai.apis.api import (
    AnswerPiece,
    changed,
    decode,
    finish_of,
    garbage,
    seed_of,
    stream_error,
    tokens_left,
)


class Ollama:
    """Ollama's native API, one JSON object a line."""

    path = "/api/generate"
    headers: Mapping[str, str] = {}
    takes_ids = False
    gives_ids = False
    constrains = False

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, request: Request, prompt: Sequence[int] | str) -> dict[str, Any]:
        """Make the JSON of a streamed request."""
        sampling = request.sampling
        for name, asked in (
            ("logprobs", sampling.logprobs is not None),
            ("ignore_eos", sampling.ignore_eos),
            ("min_tokens", sampling.min_tokens > request.num_emitted),
            ("stop_token_ids", bool(sampling.stop_token_ids)),
        ):
            if asked:
                raise RequestError(
                    f"{name}: this model's server, Ollama, has no such field; leave it out", param=name
                )
        options = {
            "num_predict": tokens_left(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            **changed(
                sampling,
                presence_penalty="presence_penalty",
                frequency_penalty="frequency_penalty",
                repetition_penalty="repeat_penalty",
            ),
        }
        if (seed := seed_of(request)) is not None:
            options["seed"] = seed & 0x7FFFFFFF
        return {"model": self._model, "prompt": prompt, "raw": True, "stream": True, "options": options}

    def answer(self, request: Request) -> "OllamaAnswer":  # noqa: ARG002 - as the others
        return OllamaAnswer()


class OllamaAnswer:
    """Reads Ollama's stream."""

    def read(self, line: bytes) -> AnswerPiece | None:
        chunk = decode(_chunks, line)
        if chunk.error is not None:
            raise stream_error(chunk.error)
        if chunk.done is None:
            raise garbage(line, "no done")
        reason = finish_of(chunk.done_reason or "stop") if chunk.done else None
        return AnswerPiece(text=chunk.response, finish_reason=reason, is_last=chunk.done)


class _Chunk(msgspec.Struct):
    response: str = ""
    done: bool | None = None
    done_reason: str | None = None
    error: str | None = None


_chunks = msgspec.json.Decoder(_Chunk)
