"""What an adapter writes: one engine's API in the words of Penstock."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.types.events import KvEvent
from penstock.core.types.requests import FinishReason, Request, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What an engine says of itself once its model is loaded.

    Attributes:
        num_blocks: KV blocks of `block_size` tokens on each data-parallel rank.
        max_running_requests: requests in the batch of each rank.
        max_batch_tokens: tokens of one step on each rank.
        kv_events: whether `Backend.events` yields.
        ranks: data-parallel ranks, each with a batch of its own.
        transferred_prompts_only: as in `EngineInfo`.
    """

    block_size: int
    num_blocks: int
    context_length: int
    vocab_size: int
    max_running_requests: int
    max_batch_tokens: int
    kv_events: bool = False
    ranks: int = 1
    transferred_prompts_only: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One request at an engine.

    Attributes:
        number: unique in the life of the engine object; a request id may come again.
        token_ids: the prompt, then what was emitted by another worker.
        sampling: checked and clipped.
        max_new_tokens: what the engine may generate; output that was emitted before does not count.
        min_new_tokens: likewise.
        num_generated: tokens that the engine has generated so far.
        cached_tokens: None before the first token.
        rank: the data-parallel rank that computes it.
        is_running: counted as running, not as waiting.
        is_dropped: aborted; whatever still comes of it is thrown away.
    """

    number: int
    request: Request
    token_ids: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    min_new_tokens: int
    num_generated: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    rank: int = 0
    is_running: bool = False
    is_dropped: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_generated

    @property
    def salt(self) -> str | None:
        """The request's salt as text, for the `cache_salt` of an engine; None without one."""
        return self.request.salt.hex() or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What came of a call since the last output.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache; read with the first tokens only.
        preemptions: how often the engine has preempted the call so far.
        kv_payload: of a `prefill_only` request with `finish_reason` LENGTH: the engine's description of its KV.
    """

    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    preemptions: int = 0
    kv_payload: bytes = b""


class Backend(Protocol):
    """One engine. `StreamedEngine` calls it on one event loop."""

    async def start(self) -> Serving:
        """Load the model.

        Raises:
            ConfigError: the package is missing or of a version that is not supported, or the engine refused or crashed.
        """
        ...

    def check(self, call: Call) -> None:
        """Refuse a call before it is under way; a router counts refusals, and gives up after a few.

        Raises:
            PenstockError: this engine cannot run it as it is.
        """
        ...

    def generate(self, call: Call) -> AsyncGenerator[Output, None]:
        """Yield what comes of a call, until an output with a `finish_reason`.

        A prefill may go on after that output; the generator ends when the engine has sent its KV. Of what it yields then,
        only `cached_tokens` is read.

        Raises:
            PenstockError: the engine refused or failed; the request ends with it.
        """
        ...

    def cancel(self, call: Call) -> None:
        """Tell the engine to drop a call; its generator then ends soon, with or without a last output."""
        ...

    def events(self) -> AsyncIterator[tuple[int, Sequence[KvEvent]]]:
        """Yield (data-parallel rank, its KV events) as they come, until cancelled; nothing if `Serving.kv_events` is false."""
        ...

    async def active_blocks(self) -> Sequence[int] | None:
        """Ask the engine how many KV blocks live requests hold on each rank; None if it does not say."""
        ...

    async def died(self) -> str:
        """Wait until the engine as a whole cannot go on; say why. The worker ends with this text."""
        ...

    async def close(self) -> None:
        """Release everything; safe before and after a failed `start`."""
        ...


def stop_tokens(
    call: Call, token_ids: Sequence[int], matched: int | None, eos_token_ids: Sequence[int]
) -> list[int]:
    """Give the stop token that an engine left out at the end of an output; nothing if it is there."""
    ends = {*call.sampling.stop_token_ids, *eos_token_ids}
    if token_ids and token_ids[-1] in ends:
        return []
    return [matched] if matched is not None else list(eos_token_ids[:1])
