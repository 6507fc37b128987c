"""What may be set for the KV tiers of a role."""

import re
from typing import Any, Self
from urllib.parse import urlsplit

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.types.events import Tier
from penstock.engine.kv_tiers.size import Size, TierSize
from penstock.kv.pool.use import EvictionPolicy

_NONE = TierSize(0, "B")
_SCHEMES = ("s3", "gs", "az", "file")
_LIKE_SIZE = re.compile(r"[-+.]*\d[\w.]*")
_SECRET = re.compile(r"secret|token|password|credential|access_key|account_key|sas")


class DiskConfig(Config):
    """A KV tier on a local drive; `PATH:SIZE` is short for both fields, and a size alone is only simulated."""

    path: str = ""
    """File of the tier; each worker has one of its own, PATH.ROLE.NUMBER. Its content is kept across restarts."""
    size: Size = _NONE
    """Of each worker's file, reserved at the start."""
    eviction: EvictionPolicy = "lru"
    """Which block a full file evicts first, as `kv.eviction`. `lru` is about as good where a tier is many times the device, and takes 400 bytes of memory a block less than `seconds`."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _unfold(cls, data: Any) -> Any:
        if isinstance(data, str | int | float) and not isinstance(data, bool):
            path, _, size = str(data).rpartition(":")
            if not TierSize.is_size(size):
                raise wrong(
                    f"must be a path and a size with its unit, as /var/cache/kv:100GiB, got {str(data)!r}"
                )
            return {"path": path, "size": size}
        return data


class ObjectConfig(Config):
    """A KV tier in an object store, which all workers with the same URL share; `URL:SIZE` is short for both fields, and a size alone is only simulated."""

    url: str = ""
    """`s3://bucket/path`, `gs://bucket/path`, `az://container/path` or `file:///directory`; packs of blocks are under `kv/` there. Credentials come from the environment, such as AWS_ACCESS_KEY_ID."""
    size: Size = _NONE
    """Of all packs under `kv/`, also of other models; beyond it workers delete the oldest. 0 is no bound: the bucket's own rules may delete packs."""
    options: dict[str, str] = pydantic.Field(default_factory=dict)
    """Settings of the store that are no secrets, by obstore's names, such as `endpoint` and `region`."""
    pack_size: Size = TierSize(16, "MiB")
    """Of one object: blocks that are offloaded at about the same time share one."""
    refresh_s: float = pydantic.Field(default=15.0, ge=0.1, le=3600)
    """Seconds between two lists of the store, by which a worker finds the packs of others."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _unfold(cls, data: Any) -> Any:
        if not isinstance(data, str | int | float) or isinstance(data, bool):
            return data
        text = str(data)
        url, _, size = text.rpartition(":")
        if TierSize.is_size(size):
            return {"url": url, "size": size}
        if "://" not in text or _LIKE_SIZE.fullmatch(size):
            raise wrong(
                f"must be a URL, or one and a size with its unit, as s3://bucket/path:1TiB or file:///mnt/kv, got {text!r}"
            )
        return {"url": text}

    @pydantic.field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url:
            return url
        parts = urlsplit(url)
        if parts.scheme == "memory":
            raise wrong(f"{url} is memory of one process, which nobody shares; set kv.host instead")
        if parts.scheme not in _SCHEMES:
            raise wrong(f"must begin with {', '.join(f'{each}://' for each in _SCHEMES)}, got {url!r}")
        if parts.scheme == "file" and (parts.netloc or parts.path in {"", "/"}):
            raise wrong(f"must name a directory from the root, as file:///mnt/kv, got {url!r}")
        if parts.scheme != "file" and not parts.netloc:
            raise wrong(f"must name a bucket, as {parts.scheme}://bucket/path, got {url!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise wrong(
                f"must be {parts.scheme}://bucket/path alone; credentials go into the environment, settings into options"
            )
        return url

    @pydantic.field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if _SECRET.search(name.lower()):
                raise wrong(
                    f"{name} is a secret, and graphs are not; set it in the environment, as AWS_{name.upper().removeprefix('AWS_')}"
                )
        return options

    @pydantic.field_validator("pack_size")
    @classmethod
    def _check_pack_size(cls, size: TierSize) -> TierSize:
        try:
            num_bytes = size.num_bytes
        except ValueError as error:
            raise wrong(str(error)) from error
        if not 1 <= num_bytes <= 1 << 30:
            raise wrong(f"must be more than 0 and at most 1GiB, got {size}")
        return size

    @pydantic.model_validator(mode="after")
    def _check_options_have_a_url(self) -> Self:
        if self.options and not self.url:
            raise wrong("options: are of a store; give its url too")
        return self


class KvConfig(Config):
    """KV of each worker: eviction, and the tiers below its devices: a size as `8GiB`, or a multiple of the device's blocks as `5x`; 0 is no tier."""

    eviction: EvictionPolicy = "seconds"
    """Which unused block a full device evicts first: the one with the fewest expected `seconds` lost, from a learned chance of reuse and the price of computing it; or the least recently used one (`lru`). For engines mock and paged and simulated ones; others evict as they do."""
    tenant_share: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Most of a device's blocks that requests of one tenant (`frontend.tenant_header`) may have left in the cache while nobody uses them; past it the tenant's own blocks go first. 1 is no bound. For the same engines."""

    prefetch: int = pydantic.Field(default=16, ge=0, le=256)
    """Next waiting requests of a worker whose prefixes are held on the device, and loaded from the tiers below, before their turn; 0 loads when it comes. For the same engines."""

    host: Size = _NONE
    """Memory of the workers' host: keeps blocks of requests that leave the batch, and loads them where that is quicker than computing. Bytes are divided among the role's workers on a host, and each worker loads the blocks of all of them."""
    host_eviction: EvictionPolicy = "seconds"
    """Which block a full host tier evicts first, as `eviction`."""
    disk: DiskConfig = DiskConfig()
    """Local drive, likewise."""
    object: ObjectConfig = ObjectConfig()
    """Object store, likewise: what one worker puts there, all load."""

    def present(self) -> dict[Tier, TierSize]:
        """Return the configured tiers, nearest first. An object store may have size 0: no bound."""
        sizes = {Tier.HOST: self.host, Tier.DISK: self.disk.size, Tier.OBJECT: self.object.size}
        return {
            tier: size for tier, size in sizes.items() if size or (tier == Tier.OBJECT and self.object.url)
        }

    def eviction_of(self, tier: Tier) -> EvictionPolicy:
        """Return which block a full tier evicts first; an object store drops packs, the oldest first."""
        return {Tier.HOST: self.host_eviction, Tier.DISK: self.disk.eviction}.get(tier, "lru")
