"""Parameters and windows of each model family as `transformers` builds it from the same config.json."""

import json
from typing import Any

import pytest

from penstock.perf.model_config import shape_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 1000, "intermediate_size": 512,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts_per_tok": 2}
LATENT = EXPERTS | {
    "num_key_value_heads": 8, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "first_k_dense_replace": 1,
}  # fmt: skip
NARROW = {"moe_intermediate_size": 128, "num_experts": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "qwen 2": ("Qwen2Config", GROUPED | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
    "gemma 3": ("Gemma3TextConfig", GROUPED | {"head_dim": 32, "sliding_window": 64}),
    "mixtral": ("MixtralConfig", EXPERTS | {"num_local_experts": 8}),
    "qwen 3 moe, some dense": (
        "Qwen3MoeConfig", EXPERTS | NARROW | {"head_dim": 32, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "gpt-oss": ("GptOssConfig", EXPERTS | {"num_local_experts": 8, "head_dim": 32, "sliding_window": 64}),
    "llama 4": (
        "Llama4TextConfig",
        GROUPED | {"num_local_experts": 8, "intermediate_size_mlp": 1024, "interleave_moe_layer_step": 2, "head_dim": 32},
    ),
    "glm 4 moe": (
        "Glm4MoeConfig",
        EXPERTS | {
            "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 2,
            "head_dim": 32,
        },
    ),
    "deepseek 2": ("DeepseekV2Config", LATENT | {"n_shared_experts": 2, "q_lora_rank": None}),
    "deepseek 3": (
        "DeepseekV3Config", LATENT | {"n_shared_experts": 1, "q_lora_rank": 96, "n_group": 4, "topk_group": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_windows_as_built(family: str) -> None:
    """Norms and biases are left out of a shape's count: half a percent of models as small as these."""
    import torch
    import transformers

    kind, fields = FAMILIES[family]
    config = getattr(transformers, kind)(**fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(json.loads(config.to_json_string()), name=family)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert shape.total_params() == pytest.approx(built, rel=0.006)
    assert shape.total_params() < built
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        assert [window is not None for window in shape.windows] == [
            kind != "full_attention" for kind in kinds
        ]
