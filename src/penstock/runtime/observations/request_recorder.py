"""A frontend's window of requests."""

import asyncio

from penstock.runtime.observations.digest_recorder import DigestRecorder
from penstock.runtime.observations.windows import RequestWindow


class RequestRecorder:
    """Counts a frontend's requests. One event loop owns it, and is its clock."""

    def __init__(self) -> None:
        """Begin a window now."""
        self._since_s = asyncio.get_running_loop().time()
        self._arrivals = self._finished = self._failed = self._cached_tokens = 0
        self._input_tokens, self._output_tokens = DigestRecorder(), DigestRecorder()
        self._ttft_s, self._itl_s = DigestRecorder(), DigestRecorder()
        self._decode_ttft_s = DigestRecorder()

    def arrived(self, input_tokens: int) -> None:
        """Count a request that was parsed and tokenized."""
        self._arrivals += 1
        self._input_tokens.add(input_tokens)

    def first_token(self, ttft_s: float, *, waited_for_decode: bool) -> None:
        """Count a first token; `waited_for_decode` as `RequestStream` says it."""
        self._ttft_s.add(ttft_s)
        if waited_for_decode:
            self._decode_ttft_s.add(ttft_s)

    def ended(self, *, output_tokens: int, cached_tokens: int, itl_s: float | None, failed: bool) -> None:
        """Count a request's end; `itl_s` is the mean time between its tokens, None where there was at most one."""
        if itl_s is not None:
            self._itl_s.add(itl_s)
        if failed:
            self._failed += 1
            return
        self._finished += 1
        self._output_tokens.add(output_tokens)
        self._cached_tokens += cached_tokens

    def take(self, *, queued: int, oldest_queued_s: float) -> RequestWindow:
        """Return the window until now, and begin the next one.

        Args:
            queued: requests that wait in the router.
            oldest_queued_s: how long the oldest of them has waited.
        """
        now_s = asyncio.get_running_loop().time()
        window = RequestWindow(
            seconds=now_s - self._since_s,
            arrivals=self._arrivals,
            finished=self._finished,
            failed=self._failed,
            input_tokens=self._input_tokens.take(),
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens.take(),
            ttft_s=self._ttft_s.take(),
            itl_s=self._itl_s.take(),
            queued=queued,
            oldest_queued_s=oldest_queued_s,
            decode_ttft_s=self._decode_ttft_s.take(),
        )
        self._since_s = now_s
        self._arrivals = self._finished = self._failed = self._cached_tokens = 0
        return window
