"""The tenants of a server by their API keys, read again as the key file changes."""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.core.errors import ConfigError
from penstock.core.files import WatchedFiles
from penstock.core.log import get_logger
from penstock.core.types.load import PeerCount, TenantCount
from penstock.frontend.tenants.api_key import digest_of, stored_digest
from penstock.frontend.tenants.key_file import TenantConfig, read_tenants
from penstock.frontend.tenants.usage import TenantUse, Usage

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
    usage: Usage | None = None
    is_link: bool = False


ANONYMOUS = Tenant()
"""Of requests without a key, where no keys are configured."""
BELIEVED = Tenant(priority_max=PRIORITY_MAX, is_trusted=True)
"""The same where `frontend.trust_headers` is set."""


class Tenants:
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
        self._usages: dict[str, Usage] = {}
        self.changed = asyncio.Event()
        """Set when there is something to tell other frontends."""
        self._set(configs)

    @classmethod
    def read(cls, file: str | None, *, secret: bytes = b"") -> "Tenants":
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
        """Give a tenant's label where anybody may read: always the same, in all frontends of a deployment, and not its name."""
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
        """Take what was counted: `counts` are told to other frontends, and `peers` is what those have used."""
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
                usage = self._usages[name] = Usage(name, config, now_s, self.changed.set)
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
