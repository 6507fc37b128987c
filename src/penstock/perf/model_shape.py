"""Shapes of models: weights and KV in bytes, and how devices divide them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import PositiveInt

from penstock.core.config import Config
from penstock.perf.hardware import Dtype, Hardware


@dataclass(frozen=True, slots=True)
class KvFootprint:
    """KV of one request, counted in tokens of the layers over the whole context.

    Example: 18 layers with a window of 128 beside 18 without. A token of 18 layers is the unit, and a request of 1,000
    tokens holds 1,128.

    token_bytes: KV bytes of one token in the layers over the whole context; in all layers if each has a window
    windows:     (window in tokens, bytes of one token in its layers over `token_bytes`) for each size of window
    grows:       whether any layer is over the whole context
    """

    token_bytes: float
    windows: tuple[tuple[int, float], ...] = ()
    grows: bool = True

    def held_tokens(self, tokens: float) -> float:
        """Count what a request of `tokens` tokens holds, in tokens of the layers over the whole context."""
        if not self.windows:
            return tokens
        windows = sum(share * min(tokens, window) for window, share in self.windows)
        return tokens + windows if self.grows else windows


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


_WIDE_DEVICES = (4, 8, 16, 32, 64, 72, 144)


class Parallel(Config):
    """Parallelism of one engine: `tp * pp * dp` devices; experts are split over `ep` of a stage's `tp * dp`."""

    tp: PositiveInt = 1
    """Tensor parallelism of attention and dense layers."""
    pp: PositiveInt = 1
    """Pipeline stages; a batch is split into as many micro-batches."""
    ep: PositiveInt = 1
    """Devices over which whole experts are distributed: a multiple of `tp` that divides `tp * dp`. 1: each expert is split
        by `tp`."""
    dp: PositiveInt = 1
    """Copies of attention and dense layers, each with its own sequences and KV. With `ep` they share the experts (wide expert
        parallelism); without, they are independent."""

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp


def parallelisms(shape: ModelShape, hardware: Hardware, *, devices_max: int) -> Iterator[Parallel]:
    """Yield common parallelisms for a model: tensor, tensor x pipeline, and wide expert parallelism.

    Tensor parallelism stays within an NVLink domain. Independent copies are replicas, so they are not yielded.
    """
    widest = min(hardware.scale_up_devices, shape.heads, devices_max, 16)
    tensor = [1 << power for power in range(widest.bit_length())]
    for tp in tensor:
        yield Parallel(tp=tp)
        if shape.moe is not None and 1 < tp <= shape.moe.num_experts:
            yield Parallel(tp=tp, ep=tp)
    for pp in (2, 4):
        if tensor[-1] * pp <= devices_max:
            yield Parallel(tp=tensor[-1], pp=pp)
    if shape.moe is None:
        return
    for devices in _WIDE_DEVICES:
        for tp in tensor:
            if devices <= min(devices_max, shape.moe.num_experts) and devices % tp == 0 and devices > tp:
                yield Parallel(tp=tp, dp=devices // tp, ep=devices)
