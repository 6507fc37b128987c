"""Makes the KV tiers of an engine from its configuration."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from penstock.core.errors import ConfigError, TransferError, TransferRefused
from penstock.core.types.events import Holder, Tier
from penstock.core.types.instances import KvHolder
from penstock.engine.kv_tiers.config import KvConfig, ObjectConfig
from penstock.engine.kv_tiers.size import TierSize
from penstock.engine.runner import RunnerInfo
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.disk.slot_file import SlotFile
from penstock.kv.host.host_tier import HostTier
from penstock.kv.host.memory import HostPart
from penstock.kv.namespace import Namespace
from penstock.kv.object.config import PacksConfig
from penstock.kv.object.packs import READ_BYTES, ObjectPacks
from penstock.kv.stored_tier import StoredTier
from penstock.seams.kv import KvTier
from penstock.transfer.storage.slots import failure, slot_bytes_of

TierMaker = Callable[[RunnerInfo, Sequence[Sequence[object]]], Sequence[KvTier]]
"""Makes tiers for an engine that has loaded its model, from its info and its KV memory; raises ConfigError."""

_KNOWN_BLOCKS_MAX = 1 << 20
"""Blocks of an object store that a worker knows at most: 250 MB of memory, and with blocks of 2 MiB 2 TiB of KV."""


_ENDPOINT = re.compile(r"^(AWS|GOOGLE|GCS|AZURE)_.*(ENDPOINT|REGION|ACCOUNT_NAME)")
"""Settings of stores in the environment that say which store it is."""


def tier_maker(
    config: KvConfig,
    *,
    worker: str = "worker",
    model_digest: Callable[[], str] = lambda: "",
    hash_key: bytes = b"",
    model_stamp: Callable[[], str] = lambda: "",
    host_part: HostPart | None = None,
) -> TierMaker | None:
    """Return what makes the configured tiers; None without any.

    Args:
        config: the tiers.
        worker: name of the worker, which its file on a disk ends with.
        model_digest: computes a digest of all weights; called once, for tiers that outlive the deployment.
        hash_key: the deployment's key of block hashes; workers with another key cannot use its blocks.
        model_stamp: computes a string that changes with the weights on this machine; called for the host tier.
        host_part: the worker's part of its host's arena; None: the host tier is the worker's alone.

    Raises:
        ConfigError: a tier can only be simulated, or its packages are missing.
    """
    _check(config)
    if not config.present():
        return None

    def make(info: RunnerInfo, memory: Sequence[Sequence[object]]) -> Sequence[KvTier]:
        device = DeviceBlocks.of(memory, info.kv_layout)
        tiers: list[KvTier] = []
        if config.host:
            size = config.host.shared_by(host_part.sharing if host_part is not None else 1)
            num_blocks = _blocks("host", size, info, device)
            kept = _namespace(model_stamp(), info)
            tiers.append(
                HostTier(
                    device,
                    num_blocks,
                    info.block_size,
                    part=host_part,
                    namespace=kept,
                    eviction=config.host_eviction,
                )
            )
        if not (config.disk.size or config.object.url):
            return tiers
        namespace = _namespace(model_digest(), info)
        if config.disk.size:
            path = Path(f"{config.disk.path}.{worker}")
            tiers.append(_disk_tier(path, config, namespace, info=info, device=device))
        if config.object.url:
            salt = hashlib.blake2b(hash_key, digest_size=16).digest()
            tiers.append(_object_tier(config, replace(namespace, salt=salt), info=info, device=device))
        return tiers

    return make


def _check(config: KvConfig) -> None:
    disk, store = config.disk, config.object
    if disk.size and not disk.path:
        raise ConfigError(
            f"kv.disk: {disk.size} and no path; give both, as /var/cache/kv:{disk.size}; a size alone can only be simulated"
        )
    if store.size and not store.url:
        raise ConfigError(
            f"kv.object: {store.size} and no url; give both, as s3://bucket/path:{store.size}; a size alone can only be"
            " simulated"
        )
    if store.url and find_spec("obstore") is None:
        raise ConfigError(
            f"kv.object: {store.url} needs obstore, which is not installed: pip install 'penstock-llm[object]'"
        )


def _blocks(tier: str, size: TierSize, info: RunnerInfo, device: DeviceBlocks) -> int:
    try:
        return size.blocks(info.num_blocks, device.block_bytes)
    except ConfigError as error:
        raise ConfigError(f"kv.{tier}: {error.message}") from error


def _namespace(digest: str, info: RunnerInfo) -> Namespace:
    assert info.kv_layout is not None, "DeviceBlocks found one"
    layout = info.kv_layout
    return Namespace(
        model_digest=digest,
        dtype=layout.dtype,
        layout=f"{layout.ranks[0].order} {layout.num_layers} {layout.num_kv_heads} {layout.head_dim}",
        block_size=info.block_size,
    )


def _disk_tier(
    path: Path, config: KvConfig, namespace: Namespace, *, info: RunnerInfo, device: DeviceBlocks
) -> KvTier:
    """Open a worker's slot file.

    Raises:
        ConfigError: the file cannot be opened, is another process's, or holds KV of another model.
    """
    num_blocks = _blocks("disk", config.disk.size, info, device)
    fix = f"name a file in a directory of a disk that user {os.geteuid()} may write to"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        failed = failure(path.parent, "making the directory", error)
        raise ConfigError(f"kv.disk: {failed.message}; {fix}") from error
    try:
        store = SlotFile(
            path,
            num_blocks * slot_bytes_of(device.block_bytes),
            device.block_bytes,
            namespace,
            eviction=config.disk.eviction,
        )
    except TransferRefused as error:
        raise ConfigError(f"kv.disk: {error.message}") from error
    except TransferError as error:
        raise ConfigError(f"kv.disk: {error.message}; {fix}") from error
    return StoredTier(store, Tier.DISK, device, num_blocks)


def _object_tier(config: KvConfig, namespace: Namespace, *, info: RunnerInfo, device: DeviceBlocks) -> KvTier:
    """Make the tier of an object store; nothing is sent yet.

    Raises:
        ConfigError: the URL or an option is wrong.
    """
    num_blocks = _KNOWN_BLOCKS_MAX
    budget_bytes = None
    if config.object.size:
        num_blocks = _blocks("object", config.object.size, info, device)
        budget_bytes = num_blocks * device.block_bytes
        num_blocks = min(num_blocks, _KNOWN_BLOCKS_MAX)
    packs = PacksConfig(
        pack_bytes=config.object.pack_size.num_bytes,
        refresh_s=config.object.refresh_s,
        blocks_max=num_blocks,
        budget_bytes=budget_bytes,
    )
    try:
        store = ObjectPacks(
            config.object.url, device.block_bytes, namespace, packs, options=config.object.options
        )
    except TransferError as error:
        raise ConfigError(f"kv.object: {error}") from error
    holder = KvHolder(kind=Holder.FLEET, id=_store_id(config.object, namespace), blocks=num_blocks)
    return StoredTier(
        store,
        Tier.OBJECT,
        device,
        num_blocks,
        shared=holder,
        chunk_bytes=packs.requests * READ_BYTES,
    )


def _store_id(config: ObjectConfig, namespace: Namespace) -> str:
    """Name the packs that a worker can load; other endpoints may have a bucket of the same name."""
    endpoints = sorted((name, value) for name, value in os.environ.items() if _ENDPOINT.search(name))
    named = [config.url, namespace.digest.hex(), *sorted(config.options.items()), *endpoints]
    return hashlib.blake2b(repr(named).encode(), digest_size=16).hexdigest()
