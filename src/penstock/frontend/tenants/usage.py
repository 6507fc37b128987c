"""What a tenant uses of its limits: requests, tokens, and requests in flight."""

from collections.abc import Callable

import msgspec

from penstock.frontend.errors import RateLimitError
from penstock.frontend.tenants.bucket import Bucket
from penstock.frontend.tenants.key_file import TenantConfig

_MINUTE_S = 60.0
_OUTPUT_TOKENS_AT_FIRST = 256.0
_MEAN_OVER = 16.0
"""The mean length of answers is taken over about so many."""
_CONCURRENCY_RETRY_AFTER_S = 1.0


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant uses in one frontend process, and may; None is no limit. `tokens_left` is below 0 while it is in debt."""

    name: str
    inflight: int
    concurrency: int | None
    requests_per_s: float | None
    tokens_per_min: float | None
    tokens_left: float | None


class Use:
    """One admitted request. `charge` counts its tokens once its prompt is known, `end` corrects that and frees its place."""

    __slots__ = ("_charged", "_count", "_is_over", "_usage")

    def __init__(self, usage: "Usage") -> None:
        self._usage = usage
        self._charged = 0.0
        self._count: Callable[[], tuple[int, int]] | None = None
        self._is_over = False

    def charge(
        self, prompt_tokens: int, output_tokens_max: int, count: Callable[[], tuple[int, int]], now_s: float
    ) -> None:
        """Charge the prompt and an answer as long as the tenant's usual ones; `count` gives the real (prompt, output) tokens at the end."""
        expected = min(self._usage.mean_output_tokens, output_tokens_max)
        self._charged, self._count = prompt_tokens + expected, count
        self._usage.take_tokens(self._charged, now_s)

    def end(self, now_s: float) -> tuple[int, int]:
        """Free the request's place, and charge what it used instead of what was expected. Safe twice.

        Returns:
            Its (prompt, output) tokens; (0, 0) for one that was never charged.
        """
        if self._is_over:
            return 0, 0
        self._is_over = True
        usage = self._usage
        usage.inflight -= 1
        if self._count is None:
            return 0, 0
        prompt_tokens, output_tokens = self._count()
        usage.take_tokens(prompt_tokens + output_tokens - self._charged, now_s)
        if output_tokens:
            usage.mean_output_tokens += (output_tokens - usage.mean_output_tokens) / _MEAN_OVER
        return prompt_tokens, output_tokens


class Usage:
    """A tenant's use over time. One event loop owns it."""

    def __init__(self, tenant: str, config: TenantConfig, now_s: float) -> None:
        self.inflight = 0
        self.mean_output_tokens = _OUTPUT_TOKENS_AT_FIRST
        self._tenant = tenant
        self._config = TenantConfig()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.limit(config, now_s)

    def limit(self, config: TenantConfig, now_s: float) -> None:
        """Set other limits; what was used under the old ones still counts."""
        self._config = config
        per_s, per_min = config.requests_per_s, config.tokens_per_min
        self._requests = _bucket(self._requests, per_s, max(per_s or 0.0, 1.0), now_s)
        self._tokens = _bucket(self._tokens, None if per_min is None else per_min / _MINUTE_S, per_min, now_s)

    def admit(self, now_s: float) -> Use:
        """Count a request.

        Raises:
            RateLimitError: the tenant is at one of its limits; it says which, and when to come back.
        """
        config = self._config
        if config.concurrency is not None and self.inflight >= config.concurrency:
            raise self._refusal(
                "concurrency",
                f"{self.inflight} of its requests are in flight",
                config.concurrency,
                _CONCURRENCY_RETRY_AFTER_S,
            )
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0, now_s)):
            raise self._refusal(
                "tokens_per_min", "its tokens of this minute are used", config.tokens_per_min, wait_s
            )
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1.0, now_s):
                raise self._refusal(
                    "requests_per_s", "its requests of this second are used", config.requests_per_s, wait_s
                )
            self._requests.take(1.0, now_s)
        self.inflight += 1
        return Use(self)

    def take_tokens(self, tokens: float, now_s: float) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, now_s)

    def view(self, now_s: float) -> TenantUse:
        """Describe it for people."""
        config = self._config
        return TenantUse(
            name=self._tenant,
            inflight=self.inflight,
            concurrency=config.concurrency,
            requests_per_s=config.requests_per_s,
            tokens_per_min=config.tokens_per_min,
            tokens_left=None if self._tokens is None else self._tokens.level(now_s),
        )

    def check(self) -> None:
        """Raise AssertionError where counts are past their bounds."""
        assert self.inflight >= 0, self.inflight
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.check()

    def _refusal(self, limit: str, problem: str, value: float | None, wait_s: float) -> RateLimitError:
        return RateLimitError(
            f"tenant {self._tenant!r}: {problem}, and its limit {limit} is {value:,g}; try again in {wait_s:.3g} s",
            limit=limit,
            retry_after_s=wait_s,
        )


def _bucket(known: Bucket | None, per_s: float | None, burst: float | None, now_s: float) -> Bucket | None:
    if per_s is None or burst is None:
        return None
    if known is None:
        return Bucket(per_s, burst, now_s)
    known.reset(per_s, burst, now_s)
    return known
