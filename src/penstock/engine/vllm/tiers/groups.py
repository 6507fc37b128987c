"""vLLM's groups of layers in Penstock's terms."""

from typing import Any

from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from penstock.core.errors import ConfigError
from penstock.engine.vllm.arguments import tokens_per_block
from penstock.kv.groups import GroupKind, KvGroup

_KINDS = {
    "full_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.MLA,
    "sliding_window": GroupKind.SLIDING_WINDOW,
    "sliding_window_mla": GroupKind.SLIDING_WINDOW,
}
_FIX = "set engine_args: {disable_hybrid_kv_cache_manager: true}, or leave kv out"


def kv_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[KvGroup, ...]:
    """Describe the groups, in vLLM's order.

    Raises:
        ConfigError: tiers cannot keep their blocks.
    """
    cache, block_size = vllm_config.cache_config, tokens_per_block(vllm_config)
    shards = vllm_config.parallel_config.decode_context_parallel_size
    groups = tuple(_group(group, block_size, shards) for group in kv_cache_config.kv_cache_groups)
    if len(groups) > 1:
        if vllm_config.speculative_config is not None:
            raise ConfigError(
                f"kv: {len(groups)} groups of layers with speculative decoding: tiers need one group for that; {_FIX}"
            )
        if cache.prefix_match_unit not in {None, block_size}:
            raise ConfigError(
                f"engine_args: prefix_match_unit: {cache.prefix_match_unit} with {len(groups)} groups of layers: tiers keep whole"
                f" blocks of {block_size}; leave it out, or leave kv out"
            )
    return groups


def _group(group: Any, block_size: int, shards: int) -> KvGroup:
    """Describe a group whose blocks have `block_size` tokens, on `shards` ranks."""
    spec = group.kv_cache_spec
    name = get_kv_cache_spec_kind(spec).value
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(
            f"kv: vLLM keeps a group of layers of kind {name} ({group.layer_names[0]}); tiers keep {', '.join(_KINDS)}; {_FIX}"
        )
    own_size = spec.block_size * (shards if spec.dcp_sharded else 1)
    if own_size != block_size:
        raise ConfigError(
            f"kv: vLLM's blocks of {group.layer_names[0]} have {own_size} tokens, and others {block_size}; tiers need"
            f" one size; {_FIX}"
        )
    window = None
    if kind is GroupKind.SLIDING_WINDOW:
        window = get_kv_cache_spec_sliding_window(spec) + getattr(spec, "extra_retained_tokens", 0)
    page_bytes = spec.page_size_bytes
    if not hasattr(spec, "kv_cache_specs"):  # else of all layers together
        page_bytes *= len(group.layer_names)
    return KvGroup(kind, tuple(group.layer_names), page_bytes // block_size, window)
