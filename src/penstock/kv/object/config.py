"""Configuration of packs."""

from dataclasses import dataclass

from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PacksConfig:
    """Sizes, times and bounds of packs.

    Attributes:
        pack_bytes: a pack is put once it has so many bytes of blocks,
        gather_s: or so many seconds after its first block came.
        requests: parallel loads, and as many parallel puts; a load takes up to 8 MiB of memory, a put `pack_bytes`.
        request_timeout_s: timeout of one request with its retries.
        retries: of one request, after errors 5xx and lost connections.
        storing_max_bytes: blocks that may be waiting to be put; further ones are not stored.
        refresh_s: seconds between two lists, by which packs of other writers are found.
        packs_max: most packs in the index; the newest ones.
        blocks_max: most blocks in the index, of the newest packs.
        age_max_s: older packs are deleted; None for no such bound.
        budget_bytes: of all packs under the prefix; the oldest ones are deleted beyond it. None for no such bound.
        collect_s: seconds between two collections, if there is such a bound.
    """

    pack_bytes: int = 16 << 20
    gather_s: float = 0.1
    requests: int = 8
    request_timeout_s: float = 30.0
    retries: int = 2
    storing_max_bytes: int = 256 << 20
    refresh_s: float = 15.0
    packs_max: int = 1 << 16
    blocks_max: int = 1 << 18
    age_max_s: float | None = None
    budget_bytes: int | None = None
    collect_s: float = 300.0

    def __post_init__(self) -> None:
        for name in (
            "pack_bytes",
            "requests",
            "request_timeout_s",
            "storing_max_bytes",
            "refresh_s",
            "packs_max",
            "blocks_max",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"packs: {name} must be above 0; got {getattr(self, name)}")
        for name in ("gather_s", "retries", "age_max_s", "budget_bytes", "collect_s"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"packs: {name} must be >= 0; got {getattr(self, name)}")
