"""A request's tokens so far and its reader: deltas that the reader has not taken, and the request that goes on elsewhere.

Deltas go to their sink in the turn of the event loop that brings them, without a task. Deltas of one turn go as one: a frontend that
is behind its workers finds several steps in one read, and handles these steps together.
"""

import asyncio
import math
from types import TracebackType
from typing import Protocol, Self

import msgspec
import numpy as np

from penstock.core.errors import RequestError, Unavailable
from penstock.core.hashing import block_hashes
from penstock.core.types.instances import ModelCard
from penstock.core.types.requests import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import NO_TOKENS, PackedHashes, PackedTokens, num_tokens, pack_hashes, unpack_hashes
from penstock.router.fleet.member import identity
from penstock.router.fleet.worker_pool import ModelPool
from penstock.seams import DeltaSink, Hold

_TARGET_SHARE_MIN = 0.1
"""Share of the TTFT target that a worker is chosen by at least, however long the request has waited."""


class Counted(Protocol):
    """Tokens that come without passing here for now."""

    @property
    def tokens(self) -> int: ...


class Progress:
    """The tokens of one request, from any workers. One task owns it.

    Received tokens count whether the reader has taken them or not: the next worker goes on after them.
    """

    def __init__(self, request: Request, card: ModelCard, hash_key: bytes) -> None:
        """Begin with nothing received.

        Args:
            request: as the frontend made it; missing block hashes are computed.
            card: the model as its workers serve it.
            hash_key: the deployment's.

        Raises:
            RequestError: the number of block hashes does not fit the model's block size.
        """
        self.prompt_tokens = num_tokens(request.token_ids) - request.num_emitted
        self._output_tokens = self._emitted_before = request.num_emitted
        self.direct: Counted | None = None
        """Counts the tokens that come by a direct stream, until `wrote` gets them."""
        self.cached_tokens: int | None = None
        """Prompt tokens that the first worker had cached; a later one also finds the output cached."""
        self.taken_tokens = 0
        """Output tokens that the reader has taken."""
        self.identity = identity(card)
        """The identity of cards whose workers can take the request."""
        self._request = request
        self.block_size = card.block_size
        self._hash_key = hash_key
        sampling = request.sampling
        self._reported = (
            self.prompt_tokens if sampling.prompt_logprobs is None else sampling.prompt_logprobs_from
        )
        """Leading prompt tokens whose logprobs came, or are not asked for."""
        self._output = bytearray()  # received here, beyond what the request brought along
        self.unread: list[Delta] = []
        """Deltas that the reader has not taken; `take` merges them."""
        self._extend_hashes()
        have, expected = (
            len(self._request.block_hashes) // 16,
            num_tokens(request.token_ids) // card.block_size,
        )
        if have != expected:
            raise RequestError(
                f"block_hashes: got {have} for {num_tokens(request.token_ids)} tokens, expected {expected}: model"
                f" {card.name} has blocks of {card.block_size} tokens; hash with the model's present card",
                param="block_hashes",
            )

    @property
    def output_tokens(self) -> int:
        """Output tokens received, including those that came with the request."""
        return self._output_tokens + (0 if self.direct is None else self.direct.tokens)

    def wrote(self, token_ids: PackedTokens) -> None:
        """Add what a direct stream has written: the reader has it."""
        self._output += token_ids
        self._output_tokens += len(token_ids) >> 2
        self.taken_tokens += len(token_ids) >> 2

    def add(self, delta: Delta) -> None:
        """Add what a worker sent; the caller handles its error."""
        if delta.prompt_logprobs:
            delta = self._report(delta)
        self._output += delta.token_ids
        self._output_tokens += len(delta.token_ids) >> 2
        if delta.cached_tokens is not None:
            if self.cached_tokens is None:
                self.cached_tokens = delta.cached_tokens
            else:
                delta = msgspec.structs.replace(delta, cached_tokens=None)
        if delta.error is None:
            self.unread.append(delta)
        elif delta.token_ids or delta.prompt_logprobs:
            self.unread.append(msgspec.structs.replace(delta, error=None, finish_reason=None))

    def end(self, finish_reason: FinishReason) -> None:
        """Close the output where it stands."""
        self.unread.append(Delta(request_id=self._request.request_id, finish_reason=finish_reason))

    def take(self) -> Delta:
        """Give all that is unread as one delta."""
        unread, self.unread = self.unread, []
        delta = unread[0] if len(unread) == 1 else _merge(unread)
        self.taken_tokens += len(delta.token_ids) >> 2
        return delta

    def request(self) -> Request:
        """Give the request to send to a worker now: the prompt and all tokens so far, without the prompt logprobs that came."""
        sampling = self._request.sampling
        if sampling.prompt_logprobs is not None and self._reported > sampling.prompt_logprobs_from:
            is_done = self._reported >= self.prompt_tokens
            sampling = msgspec.structs.replace(
                sampling,
                prompt_logprobs=None if is_done else sampling.prompt_logprobs,
                prompt_logprobs_from=0 if is_done else self._reported,
            )
            self._request = msgspec.structs.replace(self._request, sampling=sampling)
        if self._output:
            request = self._request
            self._request = msgspec.structs.replace(
                request,
                token_ids=PackedTokens(b"".join((request.token_ids, self._output))),
                num_emitted=self._output_tokens,
            )
            self._output.clear()
            self._extend_hashes()
        return self._request

    def request_in_time(self, passed_s: float) -> Request:
        """Give the same request with what is left of its TTFT target, `passed_s` after it was opened."""
        request = self.request()
        target_s = request.slo_ttft_s
        if target_s is None:
            return request
        has_begun = self.output_tokens > self._emitted_before
        left_s = max(target_s - passed_s, target_s * _TARGET_SHARE_MIN)
        return msgspec.structs.replace(request, slo_ttft_s=None if has_begun else left_s)

    def _report(self, delta: Delta) -> Delta:
        """Leave out prompt logprobs that came from an earlier worker."""
        new = []
        for logprobs in delta.prompt_logprobs:
            rest = logprobs.after(self._reported)
            if rest.ranks:
                new.append(rest)
                self._reported = rest.end
        return msgspec.structs.replace(delta, prompt_logprobs=tuple(new))

    def _extend_hashes(self) -> None:
        """Hash the full blocks that have no hash yet."""
        request, block_size = self._request, self.block_size
        packed = request.block_hashes
        done = len(packed) // 16
        if done >= num_tokens(request.token_ids) // block_size:
            return
        parent = None
        if done:
            low, high = unpack_hashes(packed[-16:]).tolist()
            parent = (low, high)
        more = block_hashes(
            request.token_ids[4 * done * block_size :],
            block_size,
            request.salt,
            key=self._hash_key,
            parent=parent,
            extra=request.extra_after(done * block_size),
        )
        self._request = msgspec.structs.replace(
            request, block_hashes=PackedHashes(packed + pack_hashes(np.ascontiguousarray(more)))
        )


def begun(request: Request, before: Progress | None, pool: ModelPool, hash_key: bytes) -> Progress:
    """Begin a request on the workers of a pool, also one that has waited, or run without a token, while the model's revision changed.

    Args:
        request: as the frontend made it.
        before: its progress by the card that was canonical until now; None: it has just come.
        pool: the workers of its model.
        hash_key: the deployment's.

    Raises:
        Unavailable: it has tokens of the former revision, or that has another tokenizer or chat template.
        RequestError: as `Progress`.
    """
    if before is not None and before.output_tokens > request.num_emitted:
        raise Unavailable(
            f"model {request.model} was replaced by one with other blocks while this request ran; send it again"
        )
    renewed = pool.renewed(request)
    if before is not None:  # the block size may differ
        renewed = msgspec.structs.replace(renewed, block_hashes=PackedHashes(b""))
    return Progress(renewed, pool.card, hash_key)


def _merge(deltas: list[Delta]) -> Delta:
    logprobs: tuple[TokenLogprob, ...] = ()
    if any(delta.logprobs for delta in deltas):
        logprobs = tuple(logprob for delta in deltas for logprob in delta.logprobs)
    tokens = b"".join(delta.token_ids for delta in deltas)
    return Delta(
        request_id=deltas[0].request_id,
        token_ids=PackedTokens(tokens) if tokens else NO_TOKENS,
        finish_reason=deltas[-1].finish_reason,
        cached_tokens=next((d.cached_tokens for d in deltas if d.cached_tokens is not None), None),
        logprobs=logprobs,
        kv=deltas[-1].kv,
        prompt_logprobs=tuple(logprobs for delta in deltas for logprobs in delta.prompt_logprobs),
    )


class _Readable(Protocol):
    def pass_on(self) -> None: ...


class ReadableRequests:
    """Requests with deltas for their sinks, which get them at the end of this turn of the loop. One event loop owns it."""

    def __init__(self) -> None:
        self._requests: dict[_Readable, None] = {}

    def add(self, request: _Readable) -> None:
        """Have a request pass on what it has; once a turn is enough."""
        if not self._requests:
            asyncio.get_running_loop().call_soon(self._pass_on)
        self._requests[request] = None

    def _pass_on(self) -> None:
        requests, self._requests = self._requests, {}
        for request in requests:
            request.pass_on()


class DeltaReader:
    """Passes deltas to a sink, or has the task fetch them. One event loop owns it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink: DeltaSink | None = None
        self._hold: Hold | None = None
        self._failure: Exception | None = None
        self.has_stopped = False
        """Whether the sink wants no more."""
        self._waiter: asyncio.Future[None] | None = None

    def taking(self, sink: DeltaSink) -> Self:
        """Pass deltas to `sink` until the block ends."""
        self._sink = sink
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink = None

    @property
    def takes(self) -> bool:
        """Whether a delta may be passed on now."""
        return (
            self._sink is not None and self._hold is None and self._failure is None and not self.has_stopped
        )

    def pass_on(self, delta: Delta) -> None:
        """Pass a delta to the sink; what it raises, the task gets."""
        assert self._sink is not None, "it takes"
        try:
            self._hold = self._sink(delta)
        except Exception as error:  # noqa: BLE001 - it ends the reader's request, not the worker's connection
            self._failure = error
        if self._hold is not None or self._failure is not None:
            self.wake()

    def interrupt(self, why: Hold | Exception) -> None:
        """Wait for something before the sink takes again, or end with an error of the sink's."""
        if isinstance(why, Exception):
            self._failure = why
        else:
            self._hold = why
        self.wake()

    async def settle(self) -> bool:
        """Wait until the sink takes again; False if it takes already. Raises what it raised."""
        if self._failure is not None:
            raise self._failure
        hold = self._hold
        if hold is None:
            return False
        await hold()
        self._hold = None
        return True

    def stop(self) -> None:
        """Take no more."""
        self.has_stopped = True
        self.wake()

    def wake(self) -> None:
        """Wake the task."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until `wake`."""
        self._waiter = self._loop.create_future()
        await self._waiter

    async def wait_until(self, time_s: float) -> None:
        """Wait until this loop time, or until `wake`."""
        self._waiter = self._loop.create_future()
        timeout_s = None if time_s == math.inf else time_s - self._loop.time()
        await asyncio.wait((self._waiter,), timeout=timeout_s)
