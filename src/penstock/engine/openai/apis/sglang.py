"""SGLang's own `POST /generate`: token ids in and out, which its `/v1/completions` does not have."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

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
    stream_error,
    tokens_left,
    top_of,
)


class SglangGenerate:
    """SGLang's native API."""

    path = "/generate"
    headers: Mapping[str, str] = {}
    takes_ids = True
    gives_ids = True
    constrains = False

    def body(self, request: Request, prompt: Sequence[int] | str) -> dict[str, Any]:
        """Make the JSON of a streamed request."""
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": tokens_left(request),
            "min_new_tokens": min_tokens_left(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            **changed(
                sampling,
                top_k="top_k",
                min_p="min_p",
                presence_penalty="presence_penalty",
                frequency_penalty="frequency_penalty",
                repetition_penalty="repetition_penalty",
                ignore_eos="ignore_eos",
            ),
        }
        if (seed := seed_of(request)) is not None:
            params["sampling_seed"] = seed
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": params, "stream": True}
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "logprob_start_len": -1}
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        if request.priority:
            body["priority"] = request.priority
        if request.rank is not None:  # older ones know the second name
            body |= {"routed_dp_rank": request.rank, "data_parallel_rank": request.rank}
        if (salt := client_salt(request)) is not None:
            body |= {
                "extra_key": salt,
                "cache_salt": salt,
            }  # older ones know the first, KV events tell the second
        return body

    def answer(self, request: Request) -> "SglangAnswer":
        return SglangAnswer(request)


class SglangAnswer:
    """Reads SGLang's stream, whose ids are all so far or, with `--stream-output`, the new ones."""

    def __init__(self, request: Request) -> None:
        self._count = request.sampling.logprobs
        self._seen = 0
        self._adds: bool | None = None  # whether each line has the new ids only; None: not known yet

    def read(self, line: bytes) -> AnswerPiece | None:
        data = sse_data(line)
        if data is None:
            return AnswerPiece(is_last=True) if is_end(line) else None
        chunk = decode(_chunks, data)
        if chunk.error is not None:
            raise reported(chunk.error)
        meta = chunk.meta_info
        reason = None if meta is None else meta.finish_reason
        if reason is not None and reason.type == "abort":
            raise stream_error(reason.message or "aborted", reason.status_code)
        if meta is not None and reason is not None and chunk.output_ids is None:  # no tokens in the last line
            return AnswerPiece(finish_reason=finish_of(reason.type), cached_tokens=meta.cached_tokens)
        if chunk.output_ids is None or meta is None:
            raise garbage(data, "no output_ids or meta_info")
        ids = chunk.output_ids
        self._adds = self._adds or (len(ids) < (meta.completion_tokens or 0))
        first = 0 if self._adds else self._seen
        if first > len(ids):
            raise garbage(data, f"{len(ids)} output_ids after {self._seen}")
        new = tuple(ids[first:])
        logprobs = self._read_logprobs(meta, new)
        self._seen += len(new)
        return AnswerPiece(
            token_ids=new,
            finish_reason=finish_of(None if reason is None else reason.type),
            cached_tokens=meta.cached_tokens,
            logprobs=logprobs,
        )

    def _read_logprobs(self, meta: "_Meta", new: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Read those of the new tokens, which are the last ones whether or not the lists begin at the first token."""
        if self._count is None or not new or not meta.output_token_logprobs:
            return ()
        pairs = meta.output_token_logprobs[-len(new) :]
        tops = (meta.output_top_logprobs or [])[-len(new) :]
        return tuple(
            TokenLogprob(
                token_id,
                -9999.0 if pair[0] is None else pair[0],
                top_of([(number, value) for value, number, *_ in (tops[index] or ())], self._count)
                if index < len(tops)
                else (),
            )
            for index, (token_id, pair) in enumerate(zip(new, pairs, strict=False))
        )


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, TokenId, str | None]] | None = None
    output_top_logprobs: list[list[tuple[float, TokenId, str | None]] | None] | None = None


class _Chunk(msgspec.Struct):
    output_ids: list[TokenId] | None = None
    meta_info: _Meta | None = None
    error: ServerError | str | None = None


_chunks = msgspec.json.Decoder(_Chunk)
