"""Which device process of vLLM this is, and what its blocks contain."""

from typing import Any

from penstock.engine.kv_tiers.staged import DeviceProcess
from penstock.engine.vllm.tiers.settings import TierSettings


def device_process(
    settings: TierSettings, block_bytes: int, vllm_config: Any, kv_cache_config: Any
) -> DeviceProcess:
    """Describe this process by vLLM's configuration."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    content = (
        f"vllm {type(spec).__name__} {getattr(spec, 'dtype', '')} {cache.cache_dtype}"
        f" {cache.get_resolved_kv_cache_layout().name} {' '.join(group.layer_names)} rank {parallel.rank} of {parallel.world_size}"
    )
    return DeviceProcess(
        worker=settings.worker,
        model_digest=settings.model_digest,
        num_blocks=kv_cache_config.num_blocks,
        block_bytes=block_bytes,
        block_size=cache.block_size,
        content=content,
        number=parallel.data_parallel_index * parallel.world_size + parallel.rank,
        processes=parallel.world_size * parallel.data_parallel_size,
        model_stamp=settings.model_stamp,
        host_part=settings.host_part,
    )
