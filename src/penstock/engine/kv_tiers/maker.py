"""Makes the KV tiers of an engine from its configuration."""

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.core.errors import ConfigError, TransferError
from penstock.core.types.events import Tier
from penstock.engine.kv_tiers.config import KvConfig
from penstock.engine.kv_tiers.size import TierSize
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
