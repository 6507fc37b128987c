"""Small random checkpoints of real architectures, for tests and benchmarks of engines. Needs the `engine` extra."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.support.tokenizer import tiny_model_files

EOS_TOKEN_ID = 0
"""End-of-message token of the tokenizer."""
ARCHITECTURES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
}
_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 48},
    "qwen2": {"head_dim": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma2": {"sliding_window": 48, "query_pre_attn_scalar": 16},
    "gemma3": {
        "num_hidden_layers": 3,
        "sliding_window": 48,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + 0.05 * index for index in range(8)],
            "long_factor": [1.0 + 2.0 * index for index in range(8)],
        },
    },
}
_SPREAD = 1.5


def make_checkpoint(path: Path, architecture: str, *, seed: int = 0, **sizes: Any) -> Path:
    """Write a float32 checkpoint with random weights and a tokenizer.

    Weights are spread wider than in a new model. So the most likely token leads clearly, and greedy outputs of two correct
    engines are equal.

    Args:
        path: directory to create.
        architecture: one of `ARCHITECTURES`.
        seed: seed of the weights.
        sizes: fields that override the small defaults of the architecture's config.

    Returns:
        `path`
    """
    fields = _SIZES | _OWN_SIZES.get(architecture, {}) | sizes
    config = ARCHITECTURES[architecture](**{key: value for key, value in fields.items() if value is not None})
    transformers.utils.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 1.0 if "embed" in name else _SPREAD * parameter.shape[-1] ** -0.5
                parameter.normal_(0, scale, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
    model.generation_config.update(eos_token_id=EOS_TOKEN_ID, do_sample=False)
    model.save_pretrained(path)
    for name, content in tiny_model_files().items():
        (path / name).write_bytes(content)
    name_all_tokens(path / "tokenizer.json", config.vocab_size)
    return path


def name_all_tokens(file: Path, vocab_size: int) -> None:
    """Give every token id without a text one, such as `w417`, so that each can be streamed."""
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    named = set(vocabulary.values())
    vocabulary |= {f"w{token_id}": token_id for token_id in range(vocab_size) if token_id not in named}
    file.write_text(json.dumps(tokenizer))
