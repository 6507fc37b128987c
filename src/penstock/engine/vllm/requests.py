"""Converts requests to vLLM's sampling arguments, and vLLM's outputs to deltas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import PenstockError, RequestError, StepFailed
from penstock.core.types.requests import Delta, FinishReason, PromptLogprobs, Request, TokenLogprob
from penstock.core.wire import num_tokens, pack_tokens, unpack_tokens

_SEEDS = 1 << 63
_TOKENS_MAX = (1 << 31) - 1
"""More than any context or vocabulary holds. A number above 64 bits cannot be sent to vLLM's core."""
_CONTINUED = 1_000_003
"""Changes the seed of a continuation, which would otherwise reuse the random numbers of the answer's first tokens."""


@dataclass(slots=True)
class Running:
    """One request in vLLM. `num_tokens` is its context so far, `missing` the prompt tokens to compute before its first output."""

    request: Request
    arrived_s: float
    num_tokens: int
    missing: int
    has_output: bool = False
    rank: int = 0

    @classmethod
    def of(cls, request: Request, arrived_s: float, rank: int = 0) -> "Running":
        """Begin a request on a data-parallel rank, which has as many of its tokens as the router expected."""
        count = num_tokens(request.token_ids)
        return cls(request, arrived_s, count, max(count - request.expected_cached_tokens, 1), rank=rank)

    def refused(self, why: PenstockError) -> Delta:
        """Make the last delta of a request that vLLM does not take."""
        return Delta(
            request_id=self.request.request_id, finish_reason=FinishReason.ERROR, error=why.to_info()
        )


def check_tokens(request: Request, vocab_size: int) -> None:
    """Check what vLLM does not check, or refuses without naming the field.

    Raises:
        RequestError: there is no token, one is outside of the vocabulary, or more were emitted than there are.
    """
    token_ids = unpack_tokens(request.token_ids)
    if not len(token_ids):
        raise RequestError("token_ids: must be at least one id, got none", param="prompt")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"token id {wrong}: must be >= 0 and < {vocab_size}, the size of the vocabulary", param="prompt"
        )
    if not 0 <= request.num_emitted < len(token_ids):
        raise RequestError(
            f"num_emitted: must be >= 0 and < {len(token_ids)}, all tokens, got {request.num_emitted}"
        )


def sampling_arguments(request: Request, eos_token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Give the arguments of vLLM's SamplingParams, with end-of-sequence tokens beside those that vLLM knows.

    vLLM takes the tokens that a migrated request has emitted as part of its prompt. So `max_tokens` and `min_tokens`
    shrink by them, frequency and presence penalties do not count them, and a seed starts its random numbers anew: a
    greedy request continues exactly after a migration, others as vLLM would continue that prompt.

    Raises:
        RequestError: the request has emitted all tokens that it may.
    """
    sampling, emitted = request.sampling, request.num_emitted
    if sampling.max_tokens <= emitted:
        raise RequestError(
            f"max_tokens: must be more than the {emitted} tokens emitted so far, got {sampling.max_tokens}",
            param="max_tokens",
        )
    max_tokens = min(sampling.max_tokens - emitted, _TOKENS_MAX)
    return {
        "max_tokens": max_tokens,
        "min_tokens": max(min(sampling.min_tokens - emitted, max_tokens), 0),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": min(sampling.top_k or 0, _TOKENS_MAX),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": _seed(request),
        "stop_token_ids": sampling.stops_with(eos_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "detokenize": False,
        "skip_clone": True,
    }


def _seed(request: Request) -> int | None:
    """Return a seed only if the client set one: vLLM samples seeded requests row by row, all others as one batch."""
    seed = request.sampling.seed
    if seed is None or request.sampling.seed_drawn:
        return None
    return (seed + request.choice + _CONTINUED * request.num_emitted) % _SEEDS


def delta_of(running: Running, output: Any) -> Delta:
    """Make a delta of vLLM's EngineCoreOutput."""
    request_id, reason = running.request.request_id, output.finish_reason
    finish = None if reason is None else _FINISH.get(str(reason), FinishReason.ERROR)
    error = None
    if finish is FinishReason.ERROR:
        error = StepFailed(
            f"request {request_id}: vLLM ended it with {reason}; another worker may serve it"
        ).to_info()
    stats = output.prefill_stats
    return Delta(
        request_id=request_id,
        token_ids=pack_tokens(output.new_token_ids),
        finish_reason=finish,
        cached_tokens=None if running.has_output or stats is None else stats.num_cached_tokens,
        logprobs=_logprobs(output.new_logprobs, running.request.sampling.logprobs),
        error=error,
        prompt_logprobs=()
        if running.request.sampling.prompt_logprobs is None
        else _prompt_logprobs(running.request, output.new_prompt_logprobs_tensors),
    )


_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


def _logprobs(lists: Any, number: int | None) -> tuple[TokenLogprob, ...]:
    """Make the logprobs of an output's tokens from rows whose first column is the sampled token.

    Rows may have more alternatives than this request asked for: as many as any request of the batch did.
    """
    if lists is None or number is None:
        return ()
    rows = zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
    return tuple(
        TokenLogprob(
            token_id=ids[0],
            logprob=values[0],
            top=tuple(zip(ids[1 : 1 + number], values[1 : 1 + number], strict=True)),
        )
        for ids, values in rows
    )


def _prompt_logprobs(request: Request, tensors: Any) -> tuple[PromptLogprobs, ...]:
    """Make the prompt's logprobs of vLLM's LogprobsTensors, which have a row for each of its tokens but the first."""
    number = request.sampling.prompt_logprobs
    if tensors is None or number is None:
        return ()
    ids, values, ranks = (np.asarray(part) for part in tensors[:3])
    count = min(len(ranks), num_tokens(request.token_ids) - request.num_emitted - 1)
    logprobs = PromptLogprobs(
        start=1,
        token_ids=pack_tokens(ids[:count, : 1 + number].astype(np.int32)),
        logprobs=values[:count, : 1 + number].astype("<f4").tobytes(),
        ranks=pack_tokens(ranks[:count].astype(np.int32)),
    )
    return (logprobs.after(request.sampling.prompt_logprobs_from),) if count else ()
