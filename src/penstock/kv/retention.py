"""How long KV is kept that nobody uses: hints of requests as uses of blocks, and the bounds of hints and pins."""

import math

from pydantic import Field

from penstock.core.clock import Clock, LoopClock
from penstock.core.config import Config
from penstock.core.errors import RequestError
from penstock.core.types.requests import Request
from penstock.kv.eviction import BlockUse, UseKind
from penstock.kv.pool import BlockPool
from penstock.kv.reference_pool import tenant_number

_ENDS_AT_ONCE = 4096
"""Most blocks whose priority ends at one arrival: about a millisecond."""


class RetentionConfig(Config):
    """Bounds of the KV that operators pin and clients ask to keep."""

    pinned_share: float = Field(default=0.5, ge=0, le=0.9)
    """Most of a worker's KV blocks that operators' pins keep; a pin that is larger keeps its beginning. 0: none is kept."""
    ttl_s: float = Field(default=60.0, gt=0)
    """How long a pin or a priority above 0 lasts, where nobody gives `ttl_s`."""
    ttl_s_max: float = Field(default=3600.0, gt=0)
    """Largest `ttl_s` of a client or operator; more is refused."""


class Retention:
    """Retention hints of one engine's requests. Not thread-safe; one task owns it."""

    def __init__(self, pool: BlockPool, config: RetentionConfig, clock: Clock | None = None) -> None:
        """Make it without hints.

        Args:
            pool: the device's blocks.
            config: its TTLs bound those of hints.
            clock: of the ends; None is the event loop's.
        """
        self._pool = pool
        self._config = config
        self._clock = clock or LoopClock()
        self._has_ends = False

    def arrive(self, request: Request) -> None:
        """Check an arriving request's hints, and end the priorities whose time is over: arrivals are what needs their blocks.

        Raises:
            RequestError: its TTL is longer than `retention.ttl_s_max`.
        """
        check_retention(request, self._config)
        if self._has_ends:
            self._pool.expire(self._clock.time(), _ENDS_AT_ONCE)

    def hints(self, request: Request) -> tuple[int, int, float, int]:
        """Return kind and priority of the request's use of blocks, seconds that the priority lasts after its end, and tenant."""
        kind, retention, tenant = use_kind(request), request.retention, tenant_number(request.tenant)
        if retention is None:
            return kind, 0, math.inf, tenant
        ttl_s = retention.ttl_s
        if ttl_s is None:  # a priority above 0 without an end would keep what nobody uses any more
            ttl_s = self._config.ttl_s if retention.priority > 0 else math.inf
        self._has_ends |= ttl_s < math.inf
        return kind, retention.priority, ttl_s, tenant

    def use(self, request: Request) -> BlockUse:
        """Say what a request that ends now used its blocks for."""
        kind, priority, ttl_s, tenant = self.hints(request)
        ends_s = self._clock.time() + ttl_s if ttl_s < math.inf else math.inf
        return BlockUse(UseKind(kind), priority, ends_s, tenant)

    def time(self) -> float:
        """Return the clock's seconds; 0 while no priority has an end."""
        return self._clock.time() if self._has_ends else 0.0


def check_ttl(param: str, ttl_s: float, config: RetentionConfig) -> None:
    """Refuse a TTL that is too long.

    Raises:
        RequestError: it is longer than `retention.ttl_s_max`.
    """
    if ttl_s > config.ttl_s_max:
        raise RequestError(
            f"{param}: must be <= {config.ttl_s_max:g}, retention.ttl_s_max, got {ttl_s:g}", param=param
        )


def check_retention(request: Request, config: RetentionConfig) -> None:
    """Refuse a request whose KV is to be kept for too long.

    Raises:
        RequestError: its TTL is longer than `retention.ttl_s_max`.
    """
    if request.retention is not None and request.retention.ttl_s is not None:
        check_ttl("kv_retention.ttl_s", request.retention.ttl_s, config)


def use_kind(request: Request) -> UseKind:
    """Return the kind of a request's use of its blocks."""
    if request.follows_tool:
        return UseKind.TOOL
    return UseKind.OTHER if request.session is None else UseKind.SESSION
