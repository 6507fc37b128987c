"""What of a model decides its speed: counted from a Hugging Face `config.json`.

Counts parameters, FLOPs and KV bytes exactly as the layers are built; norms and biases are left out (well
under 0.1 % of the bytes).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.perf.hardware import Dtype


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: one compressed KV vector a token.

    Source: DeepSeek-V2 (2024), section 2.1.
    """

    kv_lora_rank: int
    rope_head_dim: int
    nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None

    @property
    def latent_dim(self) -> int:
        """Elements of KV a token and layer."""
        return self.kv_lora_rank + self.rope_head_dim


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts in the layers after `dense_layers`."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    dense_layers: int
    expert_groups_per_token: int | None = None
    """Groups of experts, each on neighbouring devices, that one token's experts come from; None is no limit."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer decoder's sizes.

    `windows` holds one entry a layer: its sliding window in tokens, None for full attention.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_length: int
    windows: tuple[int | None, ...]
    tied_embeddings: bool = False
    mla: Mla | None = None
    moe: Moe | None = None
    weight_dtype: Dtype = Dtype.BF16
    expert_dtype: Dtype = Dtype.BF16
    """Of routed experts; checkpoints in 4 bits may keep all else wider."""
    gated: bool = field(default=True)

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def moe_layers(self) -> int:
        return 0 if self.moe is None else self.layers - self.moe.dense_layers

    def attention_params(self) -> int:
        """Parameters of one layer's attention projections."""
        if self.mla is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mla = self.mla
        q_dim = self.heads * (mla.nope_head_dim + mla.rope_head_dim)
        query = self.hidden * q_dim if mla.q_lora_rank is None else mla.q_lora_rank * (self.hidden + q_dim)
        latent = self.hidden * mla.latent_dim
        expand = mla.kv_lora_rank * self.heads * (mla.nope_head_dim + mla.v_head_dim)
        return query + latent + expand + self.heads * mla.v_head_dim * self.hidden

    def ffn_params(self, intermediate: int) -> int:
        return (3 if self.gated else 2) * self.hidden * intermediate

    def dense_params(self) -> int:
        """Parameters every token passes through, without embeddings: attention, dense and shared FFN, gates."""
        total = self.layers * self.attention_params()
        total += (self.layers - self.moe_layers) * self.ffn_params(self.intermediate)
        if self.moe is not None:
            total += self.moe_layers * (
                self.ffn_params(self.moe.shared_intermediate) + self.hidden * self.moe.num_experts
            )
        return total

    def expert_params(self) -> int:
        """Parameters of one routed expert of one layer."""
        return 0 if self.moe is None else self.ffn_params(self.moe.intermediate)

    def head_params(self) -> int:
        return self.vocab * self.hidden

    def total_params(self) -> int:
        experts = 0 if self.moe is None else self.moe_layers * self.moe.num_experts * self.expert_params()
        return self.dense_params() + experts + self.head_params() * (1 if self.tied_embeddings else 2)

    def active_params(self) -> int:
        """Parameters one token is multiplied with (the embedding is a look-up)."""
        experts = (
            0 if self.moe is None else self.moe_layers * self.moe.experts_per_token * self.expert_params()
        )
        return self.dense_params() + experts + self.head_params()

    def kv_elements_per_token(self) -> int:
        """Cached elements of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim if self.mla is None else self.mla.latent_dim

    def kv_bytes_per_token(self, kv_dtype: Dtype) -> float:
        """Cached bytes of one token in all layers; layers with a window are counted as if it were never reached."""
        return self.layers * self.kv_elements_per_token() * kv_dtype.bytes

    def attention_flops_per_pair(self, *, absorbed: bool = False) -> int:
        """FLOPs of one (query, key) pair in one layer: scores and weighted sum, all heads.

        Args:
            absorbed: MLA decode works on the latent vectors themselves (weights absorbed into the query).
        """
        if self.mla is None:
            return 4 * self.heads * self.head_dim
        if absorbed:
            return 2 * self.heads * (2 * self.mla.kv_lora_rank + self.mla.rope_head_dim)
        return 2 * self.heads * (self.mla.nope_head_dim + self.mla.rope_head_dim + self.mla.v_head_dim)


def load_shape(path: Path) -> ModelShape:
    """Read `config.json`, or a directory that holds one.

    Raises:
        ConfigError: no such file, no JSON, or a field it cannot do without is missing.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such file; expected a model directory with config.json") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: line {error.lineno}: not JSON ({error.msg})") from error
    return shape_of(config, name=str(config.get("_name_or_path") or path.name), source=str(file))


def shape_of(config: Mapping[str, Any], *, name: str, source: str = "config.json") -> ModelShape:
    """Count a model from its parsed `config.json`."""
    text = config.get("text_config", config)
    reader = _Reader(text, source)
    hidden, heads, layers = (
        reader.need(k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    weight_dtype, expert_dtype = _dtypes(config, text)
    return ModelShape(
        name=name,
        hidden=hidden,
        intermediate=reader.need("intermediate_size"),
        heads=heads,
        kv_heads=reader.get("num_key_value_heads", heads),
        head_dim=reader.get("head_dim", hidden // heads),
        vocab=reader.need("vocab_size"),
        context_length=reader.get("max_position_embeddings", 4096),
        windows=_windows(text, layers),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        mla=_mla(reader) if text.get("kv_lora_rank") else None,
        moe=_moe(reader, layers),
        weight_dtype=weight_dtype,
        expert_dtype=expert_dtype,
    )


class _Reader:
    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def get(self, key: str, default: int) -> int:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{self.source}: {key}: must be a whole number >= 0, got {value!r}")
        return value

    def need(self, key: str) -> int:
        if not self.get(key, 0):
            raise ConfigError(f"{self.source}: {key}: missing; a decoder's config.json states it")
        return self.get(key, 0)


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = text.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    pattern = text.get("sliding_window_pattern")
    if pattern:  # every pattern-th layer is full, as in Gemma 3
        return tuple(None if (index + 1) % pattern == 0 else window for index in range(layers))
    return (window,) * layers


def _mla(reader: _Reader) -> Mla:
    return Mla(
        kv_lora_rank=reader.need("kv_lora_rank"),
        rope_head_dim=reader.need("qk_rope_head_dim"),
        nope_head_dim=reader.need("qk_nope_head_dim"),
        v_head_dim=reader.need("v_head_dim"),
        q_lora_rank=reader.get("q_lora_rank", 0) or None,
    )


def _moe(reader: _Reader, layers: int) -> Moe | None:
    experts = next(
        (n for key in ("n_routed_experts", "num_local_experts", "num_experts") if (n := reader.get(key, 0))),
        0,
    )
    if experts <= 1:
        return None
    intermediate = reader.get("moe_intermediate_size", reader.need("intermediate_size"))
    shared = reader.get("shared_expert_intermediate_size", 0) or intermediate * reader.get(
        "n_shared_experts", 0
    )
    dense = min(layers, reader.get("first_k_dense_replace", 0))
    return Moe(
        num_experts=experts,
        experts_per_token=reader.need("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=shared,
        dense_layers=dense,
        expert_groups_per_token=reader.get("topk_group", 0) or None,
    )


def _dtypes(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[Dtype, Dtype]:
    """Give the formats of the weights and of the routed experts."""
    quantization = config.get("quantization_config") or {}
    method = str(quantization.get("quant_algo") or quantization.get("quant_method") or "").lower()
    stated = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
    wide = {"float32": Dtype.FP32, "float16": Dtype.FP16}.get(stated.removeprefix("torch."), Dtype.BF16)
    for word, dtype in (
        ("mxfp4", Dtype.MXFP4),
        ("nvfp4", Dtype.NVFP4),
        ("fp8", Dtype.FP8),
        ("int8", Dtype.INT8),
    ):
        if word in method or word in str(quantization.get("format", "")).lower():
            return (
                wide if dtype is Dtype.MXFP4 else dtype
            ), dtype  # MXFP4 checkpoints have it in experts only
    return wide, wide
