"""Which device process of vLLM this is, and what its blocks contain."""

from collections.abc import Sequence
from typing import Any

from penstock.engine.kv_tiers.staged import DeviceProcess
from penstock.engine.vllm.arguments import tokens_per_block
from penstock.engine.vllm.tiers.settings import TierSettings
from penstock.kv.groups import KvGroup


def device_process(
    settings: TierSettings,
    block_bytes: int,
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[KvGroup],
) -> DeviceProcess:
    """Describe this process by vLLM's configuration."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    dtypes = [getattr(group.kv_cache_spec, "dtype", "") for group in kv_cache_config.kv_cache_groups]
    tables = " | ".join(
        f"{group.kind} {group.window_tokens or ''} {group.bytes_per_token} {dtype} {' '.join(group.layers)}"
        for group, dtype in zip(groups, dtypes, strict=True)
    )
    content = (
        f"vllm {cache.cache_dtype} {cache.get_resolved_kv_cache_layout().name} {tables}"
        f" rank {parallel.rank} of {parallel.world_size}"
    )
    if (shards := parallel.decode_context_parallel_size) > 1:
        content += f" {shards} shards of {parallel.cp_kv_cache_interleave_size}"
    return DeviceProcess(
        worker=settings.worker,
        model_digest=settings.model_digest,
        num_blocks=kv_cache_config.num_blocks,
        block_bytes=block_bytes,
        block_size=tokens_per_block(vllm_config),
        content=content,
        number=parallel.data_parallel_index * parallel.world_size + parallel.rank,
        processes=parallel.world_size * parallel.data_parallel_size,
        model_stamp=settings.model_stamp,
        host_part=settings.host_part,
        hash_key=settings.hash_key,
    )
