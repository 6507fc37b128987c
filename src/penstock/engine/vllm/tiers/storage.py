"""The tiers of one device process of vLLM, over slots in host memory."""

from collections.abc import Sequence
from typing import Any

from penstock.core.types.kv_layout import BLOCK_FIRST, KvLayout, RankLayout
from penstock.engine.kv_tiers import KvConfig, TierSize, tier_maker
from penstock.engine.runner import RunnerInfo
from penstock.engine.vllm.tiers.settings import TierSettings
from penstock.kv.connector.staging import DeviceMemory, Staging
from penstock.seams.kv import KvTier


def make_tiers(
    settings: TierSettings, staging: Staging, memory: DeviceMemory, vllm_config: Any, kv_cache_config: Any
) -> Sequence[KvTier]:
    """Make the tiers of a device process, each of which has an equal share of the worker's.

    Raises:
        ConfigError: a tier cannot be made.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    num_blocks, block_bytes = kv_cache_config.num_blocks, memory.block_bytes
    processes = parallel.world_size * parallel.data_parallel_size
    number = parallel.data_parallel_index * parallel.world_size + parallel.rank
    name = settings.worker if processes == 1 else f"{settings.worker}.{number}-of-{processes}"
    kv = _share(settings.kv, processes, num_blocks, block_bytes)
    maker = tier_maker(kv, worker=name, model_digest=lambda: settings.model_digest)
    assert maker is not None, "the connector is used with tiers alone"
    info = RunnerInfo(
        num_blocks=staging.num_slots,
        block_size=cache.block_size,
        context_length=vllm_config.model_config.max_model_len,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        kv_bytes_per_block=block_bytes,
        kv_layout=_layout(vllm_config, kv_cache_config, staging.num_slots, block_bytes),
    )
    return maker(info, [[staging.memory]])


def _share(kv: KvConfig, processes: int, num_blocks: int, block_bytes: int) -> KvConfig:
    """Give a process its share, in bytes: multiples are of the device's blocks, not of the slots."""

    def bytes_of(size: TierSize) -> TierSize:
        if not size:
            return size
        blocks = size.blocks(num_blocks * processes, block_bytes)
        return TierSize(float(max(blocks // processes, 1) * block_bytes), "B")

    disk = kv.disk.model_copy(update={"size": bytes_of(kv.disk.size)})
    return kv.model_copy(update={"host": bytes_of(kv.host), "disk": disk})


def _layout(vllm_config: Any, kv_cache_config: Any, num_slots: int, block_bytes: int) -> KvLayout:
    """Describe a slot, for the namespace of what outlives the worker: the blocks of all layers, one after another."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    heads, head_dim = getattr(spec, "num_kv_heads", 1), getattr(spec, "head_size", 0)
    dtype = f"{getattr(spec, 'dtype', cache.cache_dtype)} {cache.cache_dtype}"
    part = f"vllm {cache.get_resolved_kv_cache_layout().name} {type(spec).__name__} rank {parallel.rank}/{parallel.world_size}"
    return KvLayout(
        num_layers=len(group.layer_names),
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=f"{dtype} {part}",
        element_bytes=1,
        block_size=cache.block_size,
        ranks=(
            RankLayout(
                layers=(), heads=(), num_blocks=num_slots, order=BLOCK_FIRST, strides_bytes=(block_bytes,)
            ),
        ),
    )
