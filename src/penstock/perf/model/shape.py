"""The sizes of a model that determine its speed.

Parameters, FLOPs and KV bytes are counted exactly as the layers are built; norms and biases are left out (well under
0.1 % of the bytes).
"""

from collections import Counter
from dataclasses import dataclass, field

from penstock.perf.model.hardware import Dtype
from penstock.perf.model.kv_footprint import KvFootprint


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: one compressed KV vector per token.

    Source: DeepSeek-V2 (2024), section 2.1.
    """

    kv_lora_rank: int
    rope_head_dim: int
    nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None

    @property
    def latent_dim(self) -> int:
        """KV elements per token and layer."""
        return self.kv_lora_rank + self.rope_head_dim


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts in all but `dense_layers` layers."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    dense_layers: int
    expert_groups_per_token: int | None = None
    """Most expert groups (each on neighbouring devices) from which one token's experts come; None is no limit."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer decoder's sizes.

    `windows` has one entry per layer: its sliding window in tokens, None for full attention.
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
    """Format of routed experts; 4-bit checkpoints may keep other weights wider."""
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
        """Parameters used by every token, without embeddings: attention, dense and shared FFN, gates."""
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
        """Parameters multiplied per token (the embedding is a look-up)."""
        experts = (
            0 if self.moe is None else self.moe_layers * self.moe.experts_per_token * self.expert_params()
        )
        return self.dense_params() + experts + self.head_params()

    def kv_elements_per_token(self) -> int:
        """KV elements of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim if self.mla is None else self.mla.latent_dim

    def kv_bytes_per_token(self, kv_dtype: Dtype) -> float:
        """KV bytes of one token in all layers, before any sliding window is full."""
        return self.layers * self.kv_elements_per_token() * kv_dtype.bytes

    def kv_footprint(self, kv_dtype: Dtype) -> KvFootprint:
        """KV that a request holds if an engine frees what falls out of the sliding windows."""
        layer_bytes = self.kv_elements_per_token() * kv_dtype.bytes
        whole = self.windows.count(None)
        unit = whole or self.layers
        windows = Counter(window for window in self.windows if window is not None)
        shares = tuple((window, layers / unit) for window, layers in sorted(windows.items()))
        return KvFootprint(unit * layer_bytes, shares, grows=whole > 0)

    def attention_flops_per_pair(self, *, absorbed: bool = False) -> int:
        """FLOPs of one (query, key) pair in one layer: scores and weighted sum, all heads.

        Args:
            absorbed: MLA decode on latent vectors (weights absorbed into the query).
        """
        if self.mla is None:
            return 4 * self.heads * self.head_dim
        if absorbed:
            return 2 * self.heads * (2 * self.mla.kv_lora_rank + self.mla.rope_head_dim)
        return 2 * self.heads * (self.mla.nope_head_dim + self.mla.rope_head_dim + self.mla.v_head_dim)
