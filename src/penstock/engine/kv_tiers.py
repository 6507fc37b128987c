"""Makes the KV tiers of an engine from its configuration."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic

from penstock.core.config import Config
from penstock.core.errors import ConfigError, TransferError
from penstock.core.types.events import Tier
from penstock.engine.runner import RunnerInfo
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.disk.data import ALIGNMENT
from penstock.kv.disk.slot_file import SlotFile
from penstock.kv.host.host_tier import HostTier
from penstock.kv.namespace import Namespace
from penstock.kv.stored_tier import StoredTier
from penstock.seams.kv import KvTier

TierMaker = Callable[[RunnerInfo, Sequence[Sequence[object]]], Sequence[KvTier]]
"""Makes tiers for an engine that has loaded its model, from its info and its KV memory; raises ConfigError."""

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_MULTIPLE_MAX = 10_000
"""A tier has at most so many times the blocks of the device."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(x|[KMGT]i?B|B)?")


class TierSize:
    """A tier's capacity: bytes, or a multiple of the device's blocks."""

    def __init__(self, number: float, unit: str) -> None:
        self.number = number
        self.unit = unit

    @classmethod
    def parse(cls, value: object) -> "TierSize":
        """Read `8GiB`, `500MB`, `5x`, or 0 for no tier.

        Raises:
            ValueError: it is no such size.
        """
        if isinstance(value, TierSize):
            return value
        text = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value
        match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or (match[2] is None and float(match[1])):
            raise ValueError(
                "must be a size with its unit, as 8GiB, or a multiple of the device's blocks, as 5x"
            )
        return cls(float(match[1]), match[2] or "B")

    def __bool__(self) -> bool:
        return self.number > 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TierSize) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{self.number:g}{self.unit}" if self else "0"

    def blocks(self, num_blocks: int, block_bytes: float) -> int:
        """Convert to blocks.

        Args:
            num_blocks: of the device.
            block_bytes: size of one.

        Raises:
            ConfigError: it is less than one block, or more than 10,000 times the device's.
        """
        count = int(
            self.number * num_blocks if self.unit == "x" else self.number * _UNITS[self.unit] / block_bytes
        )
        if self and count < 1:
            raise ConfigError(
                f"{self} is less than one block of {block_bytes / 1e6:.3g} MB (the device has {num_blocks:,}); make it larger,"
                " or 0 for none"
            )
        if count > _MULTIPLE_MAX * num_blocks:
            raise ConfigError(
                f"{self} is {count / num_blocks:,.0f} times the {num_blocks:,} blocks of the device; expected at most"
                f" {_MULTIPLE_MAX:,} times"
            )
        return count


Size = Annotated[
    TierSize,
    pydantic.PlainValidator(TierSize.parse),
    pydantic.PlainSerializer(str, return_type=str),
    pydantic.WithJsonSchema({"type": "string"}),
]


class DiskConfig(Config):
    """A KV tier on a local drive; `PATH:SIZE` is short for both fields, and a size alone is only simulated."""

    path: str = ""
    """File of the tier; each worker has one of its own, PATH.ROLE.NUMBER. Its content is kept across restarts."""
    size: Size = TierSize(0, "B")
    """Of each worker's file, reserved at the start."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _unfold(cls, data: Any) -> Any:
        if isinstance(data, str | int | float) and not isinstance(data, bool):
            path, _, size = str(data).rpartition(":")
            return {"path": path, "size": size}
        return data


class KvConfig(Config):
    """KV tiers below the devices of each worker: a size as `8GiB`, or a multiple of the device's blocks as `5x`; 0 is no tier."""

    host: Size = TierSize(0, "B")
    """Memory of the worker's machine: keeps blocks of requests that leave the batch, and loads them where that is quicker than computing."""
    disk: DiskConfig = DiskConfig()
    """Local drive, likewise."""
    object: Size = TierSize(0, "B")
    """Object store. Only simulated in this version."""

    def present(self) -> dict[Tier, TierSize]:
        """Return the configured tiers, nearest first."""
        sizes = {Tier.HOST: self.host, Tier.DISK: self.disk.size, Tier.OBJECT: self.object}
        return {tier: size for tier, size in sizes.items() if size}


def tier_maker(
    config: KvConfig, *, worker: str = "worker", model_digest: Callable[[], str] = lambda: ""
) -> TierMaker | None:
    """Return what makes the configured tiers; None without any.

    Args:
        config: the tiers.
        worker: name of the worker, which its file on a disk ends with.
        model_digest: computes a digest of all weights; called for a tier that outlives the worker.

    Raises:
        ConfigError: a tier is only simulated, or a disk has no path.
    """
    if config.object:
        raise ConfigError(
            f"kv.object: {config.object}: this version simulates the object tier alone; set kv.host or kv.disk, or run"
            " `penstock simulate`"
        )
    if config.disk.size and not config.disk.path:
        raise ConfigError(
            f"kv.disk: {config.disk.size} and no path; give both, as /var/cache/kv:{config.disk.size}; a size alone can only"
            " be simulated"
        )
    if not config.present():
        return None

    def make(info: RunnerInfo, memory: Sequence[Sequence[object]]) -> Sequence[KvTier]:
        device = DeviceBlocks.of(memory, info.kv_layout, num_blocks=info.num_blocks)
        tiers: list[KvTier] = []
        if config.host:
            tiers.append(HostTier(device, _blocks("host", config.host, info, device), info.block_size))
        if config.disk.size:
            num_blocks = _blocks("disk", config.disk.size, info, device)
            path = Path(f"{config.disk.path}.{worker}")
            tiers.append(_disk_tier(path, model_digest(), info=info, device=device, num_blocks=num_blocks))
        return tiers

    return make


def _blocks(tier: str, size: TierSize, info: RunnerInfo, device: DeviceBlocks) -> int:
    try:
        return size.blocks(info.num_blocks, device.block_bytes)
    except ConfigError as error:
        raise ConfigError(f"kv.{tier}: {error.message}") from error


def _disk_tier(path: Path, digest: str, *, info: RunnerInfo, device: DeviceBlocks, num_blocks: int) -> KvTier:
    """Open a worker's slot file.

    Raises:
        ConfigError: the file cannot be opened, is another process's, or holds KV of another model.
    """
    assert info.kv_layout is not None, "DeviceBlocks found one"
    layout = info.kv_layout
    namespace = Namespace(
        model_digest=digest,
        dtype=layout.dtype,
        layout=f"{layout.ranks[0].order} {layout.num_layers} {layout.num_kv_heads} {layout.head_dim}",
        block_size=info.block_size,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        slot_bytes = -(-device.block_bytes // ALIGNMENT) * ALIGNMENT
        store = SlotFile(path, num_blocks * slot_bytes, device.block_bytes, namespace)
    except (OSError, TransferError) as error:
        raise ConfigError(f"kv.disk: {path}: {error}") from error
    return StoredTier(store, Tier.DISK, device, num_blocks)
