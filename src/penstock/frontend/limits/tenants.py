"""Tenants: who asks, what each tenant may use, and what it has used.

Frontends of a deployment share a tenant's limits: each tells a worker what its tenants use, and hears the others' counts. No request
waits for an exchange; between two of them a frontend knows the others' use as of the last one.
"""

import asyncio
import hashlib
import hmac
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.files import WatchedFiles
from penstock.core.log import get_logger
from penstock.core.types.load import PeerCount, TenantCount
from penstock.frontend.errors import AdminTokenError, ApiKeyError, RateLimitError
from penstock.frontend.limits.keys import TenantConfig, digest_of, read_tenants, stored_digest


class TokenBucket:
    """Its level rises at the rate up to the burst. What is taken lowers it, below 0 too: that is a debt, paid before the next.

    Not thread-safe; times are event loop time.
    """

    __slots__ = ("_at_s", "_burst", "_level", "_per_s")

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        """Start it full."""
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at_s = now_s

    def reset(self, per_s: float, burst: float, now_s: float) -> None:
        """Change the rate; a debt stays, and more than the new burst is lost."""
        self._level = min(self.level(now_s), burst)
        self._per_s, self._burst = per_s, burst

    def level(self, now_s: float) -> float:
        """Give what may be taken now."""
        if now_s > self._at_s:
            self._level = min(self._level + (now_s - self._at_s) * self._per_s, self._burst)
            self._at_s = now_s
        return self._level

    def wait_s(self, least: float, now_s: float) -> float:
        """Give the seconds until the level is `least`, which is at most the burst; 0 if it is."""
        missing = min(least, self._burst) - self.level(now_s)
        return max(missing / self._per_s, 0.0)

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount; a negative one is given back."""
        self._level = min(self.level(now_s) - amount, self._burst)

    def check(self) -> None:
        """Raise AssertionError where the level is past the burst."""
        assert math.isfinite(self._level), self._level
        assert self._level <= self._burst, f"{self._level} of {self._burst}"


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


class RequestUse:
    """One admitted request. `charge` counts its tokens once its prompt is known, `end` corrects that and frees its place."""

    __slots__ = ("_charged", "_count", "_is_over", "_usage")

    def __init__(self, usage: "TenantUsage") -> None:
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
        """Free the request's place, and charge its real tokens in the place of the expected ones. Safe twice.

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


class TenantUsage:
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
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.limit(config, now_s)

    def limit(self, config: TenantConfig, now_s: float) -> None:
        """Set other limits; what was used under the old ones still counts."""
        self._config = config
        per_s, per_min = config.requests_per_s, config.tokens_per_min
        self._requests = _bucket(self._requests, per_s, max(per_s or 0.0, 1.0), now_s)
        self._tokens = _bucket(self._tokens, None if per_min is None else per_min / _MINUTE_S, per_min, now_s)

    def admit(self, now_s: float) -> RequestUse:
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
        return RequestUse(self)

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


def _bucket(
    known: TokenBucket | None, per_s: float | None, burst: float | None, now_s: float
) -> TokenBucket | None:
    if per_s is None or burst is None:
        return None
    if known is None:
        return TokenBucket(per_s, burst, now_s)
    known.reset(per_s, burst, now_s)
    return known


PRIORITY_MAX = 1000
_PRIORITIES = {"high": (1, PRIORITY_MAX), "normal": (0, 0), "low": (-1, -1)}
_SALT_BYTES = 16
_ALIAS_BYTES = 6
_START_BYTES = 8
"""Digests are found by so many of their first bytes."""
_NO_COUNT, _NO_PEERS = TenantCount(), PeerCount()
_log = get_logger()


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is.

    Attributes:
        priority: of a request that asks for none.
        priority_max: highest that its requests may ask for.
        is_trusted: its requests may name another tenant and any priority in headers.
        cache_salt: begins the salt of its prompts' block hashes; empty: that of requests without keys.
        usage: of its limits; None without limits.
        is_link: its requests go to no other region.
    """

    name: str = ""
    priority: int = 0
    priority_max: int = 0
    is_trusted: bool = False
    cache_salt: str = ""
    usage: TenantUsage | None = None
    is_link: bool = False


ANONYMOUS = Tenant()
"""Of requests without a key, where no keys are configured."""
BELIEVED = Tenant(priority_max=PRIORITY_MAX, is_trusted=True)
"""The same where `frontend.trust_headers` is set."""


class TenantKeys:
    """Finds the tenant of a key. One event loop owns it."""

    def __init__(
        self,
        configs: Mapping[str, TenantConfig],
        *,
        file: str | None = None,
        watched: WatchedFiles | None = None,
        secret: bytes = b"",
    ) -> None:
        """Take tenants as they were read.

        Args:
            configs: the tenants by name; empty: no keys are asked for.
            file: where they came from.
            watched: the same file, for `watch`; None: they stay as they are.
            secret: makes cache salts that no client can guess; the same in all frontends of a deployment.
        """
        self._file = file
        self._watched = watched
        self._secret = secret
        self._by_start: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        self._by_name: dict[str, Tenant] = {}
        self._usages: dict[str, TenantUsage] = {}
        self.changed = asyncio.Event()
        """Set when there is something to tell other frontends."""
        self._set(configs)

    @classmethod
    def read(cls, file: str | None, *, secret: bytes = b"") -> "TenantKeys":
        """Read the key file and PENSTOCK_API_KEY.

        Raises:
            ConfigError: the file is wrong.
        """
        watched = None if file is None else WatchedFiles(file)
        return cls(read_tenants(file), file=file, watched=watched, secret=secret)

    @property
    def ask_for_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self._by_name)

    def of_key(self, key: bytes) -> Tenant | None:
        """Give the tenant of a key as a client sent it. The time taken tells nothing of known keys: whole digests are compared."""
        digest = digest_of(key)
        for stored, tenant in self._by_start.get(digest[:_START_BYTES], ()):
            if hmac.compare_digest(stored, digest):
                return tenant
        return None

    def acting(self, gateway: Tenant, name: str) -> Tenant:
        """Give the tenant that a trusted one names; one that the file does not know waits by its name, with the gateway's limits."""
        if not name:
            return gateway
        known = self._by_name.get(name)
        if known is None:
            return replace(gateway, name=name)
        return replace(known, priority_max=PRIORITY_MAX, is_trusted=True)

    def alias(self, name: str) -> str:
        """Give the label of a tenant where anybody may read it: a keyed hash of the name, the same in all frontends of a deployment."""
        digest = hashlib.blake2b(name.encode(), key=self._secret, person=b"metrics", digest_size=_ALIAS_BYTES)
        return digest.hexdigest()

    def uses(self) -> list[TenantUse]:
        """Describe what each tenant uses and may, by name."""
        now_s = _now_s()
        return [usage.view(now_s) for _, usage in sorted(self._usages.items())]

    def uncounted(self) -> dict[str, TenantCount]:
        """Give what other frontends have not been told of tenants with limits, by name; empty where no tenant has one."""
        return {name: usage.uncounted() for name, usage in self._usages.items() if usage.is_limited}

    def counted(self, counts: Mapping[str, TenantCount], peers: Mapping[str, PeerCount]) -> None:
        """Take an exchange: other frontends were told `counts`, and have themselves used `peers`."""
        now_s = _now_s()
        for name, usage in self._usages.items():
            usage.counted(counts.get(name, _NO_COUNT), peers.get(name, _NO_PEERS), now_s)

    async def watch(self) -> None:
        """Read the file again whenever it has changed, for ever. A wrong file is logged, and what was read before stays."""
        if self._watched is not None:
            await self._watched.watch(self.reload)

    def reload(self) -> None:
        """Read the file again if it has changed."""
        if self._watched is None or not self._watched.changed():
            return
        try:
            self._set(read_tenants(self._file))
        except ConfigError as error:
            _log.error(
                "api_keys_not_reloaded",
                file=self._file,
                error=error.message,
                fix="mend the file; the keys before stay valid",
            )
        else:
            _log.info("api_keys_reloaded", file=self._file, tenants=len(self._by_name))

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        assert self._usages.keys() >= self._by_name.keys()
        for usage in self._usages.values():
            usage.check()

    def _set(self, configs: Mapping[str, TenantConfig]) -> None:
        now_s = _now_s()
        self._usages = {name: usage for name, usage in self._usages.items() if name in configs}
        by_start: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        by_name: dict[str, Tenant] = {}
        for name, config in configs.items():
            usage = self._usages.get(name)
            if usage is None:
                usage = self._usages[name] = TenantUsage(name, config, now_s, self.changed.set)
            else:
                usage.limit(config, now_s)
            priority, priority_max = _PRIORITIES[config.priority]
            tenant = by_name[name] = Tenant(
                name=name,
                priority=priority,
                priority_max=PRIORITY_MAX if config.trusted else priority_max,
                is_trusted=config.trusted,
                cache_salt=self._salt(name if config.cache_salt is None else config.cache_salt),
                usage=usage,
                is_link=config.link,
            )
            for key in config.keys:
                digest = stored_digest(key)
                assert digest is not None, "checked by TenantConfig"
                by_start.setdefault(digest[:_START_BYTES], []).append((digest, tenant))
        self._by_start, self._by_name = by_start, by_name

    def _salt(self, name: str) -> str:
        """Give a salt that clients cannot send as their own `cache_salt`."""
        if not name:
            return ""
        return hashlib.blake2b(name.encode(), key=self._secret, digest_size=_SALT_BYTES).hexdigest()


def _now_s() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # before the loop: buckets are full whenever they begin
        return 0.0


PAUSE_S = 0.02
"""Least time between exchanges."""
_TENANT_S = 0.0005
"""The same for each tenant in the last one: eight frontends then take at most 6 % of a core of the worker, measured with 40 and 1,000 tenants."""
BUSY_S, IDLE_S = 0.1, 1.0
"""Most time between exchanges, while limited tenants have requests anywhere and while they have none."""

Count = Callable[[Mapping[str, TenantCount]], Awaitable[Mapping[str, PeerCount]]]


async def share_limits(tenants: TenantKeys, count: Count) -> None:
    """Exchange what tenants use, for ever.

    Args:
        tenants: of this frontend.
        count: adds this frontend's use of each tenant that has some, and returns what others have used since the last call.
    """
    is_failing = False
    while True:
        tenants.changed.clear()
        uncounted = tenants.uncounted()
        counts = {name: each for name, each in uncounted.items() if each != TenantCount()}
        peers: Mapping[str, PeerCount] = {}
        if uncounted:  # else no tenant has a limit; the key file may name one later
            try:
                peers = await count(counts)
            except PenstockError as error:
                if is_failing:  # what was heard is too old, and a debt of hours would help nobody
                    tenants.counted(counts, {})
                else:
                    _log.warning("limits_not_shared", error=error.message)
                is_failing = True
            else:
                tenants.counted(counts, peers)
                if is_failing:
                    _log.info("limits_shared")
                is_failing = False
        await asyncio.sleep(max(PAUSE_S, _TENANT_S * max(len(counts), len(peers))))
        try:
            async with asyncio.timeout(BUSY_S if counts or peers or is_failing else IDLE_S):
                await tenants.changed.wait()
        except TimeoutError:
            pass


_SCHEME = "bearer "


class ApiAccess:
    """Checks keys and tokens in constant time."""

    def __init__(self, *, tenants: TenantKeys | None = None, admin_token: str = "") -> None:
        """Set the tenants with their keys: without any the API is open, without a token `/admin` is closed."""
        self.tenants = tenants or TenantKeys({})
        self._admin_token = admin_token.encode()

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """Give the tenant of a request by its API key, as a bearer token or in `X-API-Key`; the anonymous one where no keys are set.

        Raises:
            ApiKeyError: API keys are set and the request has none of them.
        """
        if not self.tenants.ask_for_keys:
            return ANONYMOUS
        tenant = self.tenants.of_key(_bearer(headers) or _bytes_of(headers.get("X-API-Key", "")))
        if tenant is None:
            raise ApiKeyError(
                "Authorization: must be 'Bearer KEY' with an API key of this server; ask who runs it for one",
            )
        return tenant

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        return bool(self._admin_token) and hmac.compare_digest(_bearer(headers), self._admin_token)

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raises: AdminTokenError: the request lacks the token."""
        if not self.is_admin(headers):
            raise AdminTokenError(
                "Authorization: must be 'Bearer TOKEN' with the admin token: PENSTOCK_ADMIN_TOKEN of the server, else what is"
                " in the file admin_token of its state directory",
            )


def _bearer(headers: Mapping[str, str]) -> bytes:
    value = headers.get("Authorization", "")
    if value[: len(_SCHEME)].lower() != _SCHEME:
        return b""
    return _bytes_of(value[len(_SCHEME) :])


def _bytes_of(value: str) -> bytes:
    return value.strip().encode("utf-8", "surrogateescape")
