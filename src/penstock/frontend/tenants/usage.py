"""What a tenant uses of its limits: requests, tokens, and requests in flight.

Frontends of a deployment share a tenant's limits: what requests at other frontends use (`shared_limits`) is taken from the same buckets.
"""

import math
from collections.abc import Callable

import msgspec

from penstock.core.types.load import PeerCount, TenantCount
from penstock.frontend.errors import RateLimitError
from penstock.frontend.tenants.bucket import Bucket
from penstock.frontend.tenants.key_file import TenantConfig

_MINUTE_S = 60.0
_OUTPUT_TOKENS_AT_FIRST = 256.0
_MEAN_OVER = 16.0
"""The mean length of answers is taken over about so many."""
_CONCURRENCY_RETRY_AFTER_S = 1.0


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant uses, and may; None is no limit. `inflight` counts one frontend process. `tokens_left` is below 0 in debt."""

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
        self._charged = 0
        self._count: Callable[[], tuple[int, int]] | None = None
        self._is_over = False

    def charge(
        self, prompt_tokens: int, output_tokens_max: int, count: Callable[[], tuple[int, int]], now_s: float
    ) -> None:
        """Charge the prompt and an answer as long as the tenant's usual ones; `count` gives the real (prompt, output) tokens at the end."""
        expected = min(round(self._usage.mean_output_tokens), output_tokens_max)
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
        usage.note()
        if self._count is None:
            return 0, 0
        prompt_tokens, output_tokens = self._count()
        usage.take_tokens(prompt_tokens + output_tokens - self._charged, now_s)
        if output_tokens:
            usage.mean_output_tokens += (output_tokens - usage.mean_output_tokens) / _MEAN_OVER
        return prompt_tokens, output_tokens


class Usage:
    """A tenant's use over time. One event loop owns it."""

    def __init__(
        self, tenant: str, config: TenantConfig, now_s: float, changed: Callable[[], None] = lambda: None
    ) -> None:
        """Begin without use; `changed` is called when there is something to tell other frontends."""
        self.inflight = 0
        self._changed = changed
        self._requests_uncounted, self._tokens_uncounted = 0, 0
        self._peers = PeerCount()
        self._inflight_then = 0  # when `_peers` came
        self.mean_output_tokens = _OUTPUT_TOKENS_AT_FIRST
        self.tenant = tenant
        """Name in the key file."""
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
        if config.concurrency is not None and self.inflight >= self._inflight_max(config.concurrency):
            raise self._refusal(
                "concurrency",
                self._in_flight(),
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
            self._requests_uncounted += 1
        self.inflight += 1
        self.note()
        return Use(self)

    def take_tokens(self, tokens: int, now_s: float) -> None:
        """Take tokens of a request; fewer than 0 are given back."""
        if self._tokens is not None:
            self._tokens.take(tokens, now_s)
            self._tokens_uncounted += tokens
            self.note()

    def note(self) -> None:
        """Note that there is something to tell other frontends, if there is a limit to share."""
        if self.is_limited:
            self._changed()

    @property
    def is_limited(self) -> bool:
        """Whether the tenant has any limit."""
        config = self._config
        return self._requests is not None or self._tokens is not None or config.concurrency is not None

    def uncounted(self) -> TenantCount:
        """Give what other frontends have not been told."""
        return TenantCount(
            requests=self._requests_uncounted, tokens=self._tokens_uncounted, inflight=self.inflight
        )

    def counted(self, count: TenantCount, peers: PeerCount, now_s: float) -> None:
        """Note that other frontends are told `count`, and take from the limits what they have used."""
        self._requests_uncounted -= count.requests
        self._tokens_uncounted -= count.tokens
        self._peers, self._inflight_then = peers, self.inflight
        if self._requests is not None:
            self._requests.take(peers.requests, now_s)
        if self._tokens is not None:
            self._tokens.take(peers.tokens, now_s)

    def _in_flight(self) -> str:
        known = f"{self.inflight + self._peers.inflight} of its requests are in flight"
        frontends = self._peers.frontends + 1
        return known if frontends == 1 else f"{known} at {frontends} frontends, which share its free places"

    def _inflight_max(self, concurrency: int) -> int:
        """Give how many requests may be in flight here until frontends have counted again: an equal share of the free places more."""
        free = concurrency - self._peers.inflight - self._inflight_then
        return self._inflight_then + math.ceil(free / (self._peers.frontends + 1))

    def view(self, now_s: float) -> TenantUse:
        """Describe it for people."""
        config = self._config
        return TenantUse(
            name=self.tenant,
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
            f"tenant {self.tenant!r}: {problem}, and its limit {limit} is {value:,g}; try again in {wait_s:.3g} s",
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
