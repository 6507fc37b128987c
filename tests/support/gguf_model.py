"""A checkpoint as a GGUF file, for llama.cpp. Needs `gguf`, and the `engine` extra."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

_NORMAL, _CONTROL = 1, 3  # kinds of tokens
_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model_dir: Path, path: Path) -> Path:
    """Write a Llama with a byte-level BPE tokenizer as float32.

    Returns:
        `path`
    """
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, json.loads((model_dir / "tokenizer.json").read_text()), config)
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        values = tensor.to(torch.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _interleaved(values, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(_name(name), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"] | {
        token["content"]: token["id"] for token in tokenizer["added_tokens"]
    }
    special = {token["id"] for token in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([_CONTROL if number in special else _NORMAL for number in range(len(vocabulary))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(value=False)


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_BLOCK_NAMES[part]}.weight"


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put rows that rotary embeddings turn together beside each other, as llama.cpp wants them; they lie half a head apart."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns)
        .transpose(1, 2)
        .reshape(rows, columns)
        .contiguous()
    )
