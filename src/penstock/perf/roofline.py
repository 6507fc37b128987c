"""The roofline: a model's bytes and FLOPs over the hardware's bandwidth and peak.

Each matrix product takes the smooth maximum of arithmetic and weight traffic. Attention, collectives and launches are
added. One set of factors serves all models and devices. Decode-only steps follow each other through a pipeline without a
gap. A step with prompts ends when its last micro-batch has left the pipeline. At a fixed batch a decode step is piecewise
linear in context, which the simulator relies on.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from penstock.core.config import Config
from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.perf.hardware import Dtype, Hardware
from penstock.perf.model_shape import KvFootprint, ModelShape, Moe, Parallel


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of all layers of one engine.

    windows:               (window in tokens or None, number of such layers)
    flops_per_pair:        FLOPs per (query, key) pair and layer, all heads
    decode_flops_per_pair: the same in decode, where MLA works on latent vectors
    kv_elements_per_token: KV elements per token and layer
    devices:               devices over which the heads are split
    kv_shards:             devices over which one sequence's KV is split
    """

    windows: tuple[tuple[int | None, int], ...]
    flops_per_pair: int
    decode_flops_per_pair: int
    kv_elements_per_token: int
    kv_element_bytes: float
    devices: int
    kv_shards: int
    flops_per_s: float
    kv_bytes_per_s: float

    def prefill_s(self, pairs: float) -> float:
        """Seconds of `pairs` (query, key) pairs, summed over the layers."""
        return pairs * self.flops_per_pair / self.devices / self.flops_per_s

    def decode_s(self, queries: float, batch: float, context_tokens: float) -> float:
        """Seconds to read the batch's KV once, or of the arithmetic if larger, as with MLA."""
        if batch <= 0:
            return 0.0
        tokens = 0.0
        for window, count in self.windows:
            tokens += count * (context_tokens if window is None else min(context_tokens, batch * window))
        kv_bytes = tokens * self.kv_elements_per_token * self.kv_element_bytes / self.kv_shards
        flops = tokens * queries / batch * self.decode_flops_per_pair / self.devices
        return max(kv_bytes / self.kv_bytes_per_s, flops / self.flops_per_s)


def causal_pairs(new: int, cached: int, window: int | None) -> float:
    """Count the keys attended by `new` queries after `cached` tokens."""
    end = cached + new
    if window is None or end <= window:
        return new * cached + new * (new + 1) / 2
    growing = max(0, window - cached)  # queries whose window covers all earlier tokens
    return growing * cached + growing * (growing + 1) / 2 + (new - growing) * window


class Factors(Config):
    """Fractions of peaks, and fixed costs of launches and collectives.

    `tools/fit_roofline.py` fits them: all-reduces to those measured on H100, and gemm, attention, kv_bandwidth, layer_s
    and step_s to three of the reference tables (8B on one H100, 70B on four and in fp8 on two). The others were chosen
    before, to the tables together. Tests compare with the three tables that are left out.
    """

    gemm: float = Field(default=0.77, gt=0, le=1)
    """Fraction of the peak, for 16- and 32-bit products of many rows."""
    gemm_narrow: float = Field(default=0.66, gt=0, le=1)
    """Fraction of the peak, for 8- and 4-bit products."""
    gemm_half_rows: float = Field(default=22.0, ge=0)
    """Rows at which a product reaches half of `gemm`."""
    attention: float = Field(default=0.69, gt=0, le=1)
    """Fraction of the 16-bit peak, for prefill attention."""
    bandwidth: float = Field(default=0.92, gt=0, le=1)
    """Fraction of memory bandwidth, for weights."""
    kv_bandwidth: float = Field(default=0.90, gt=0, le=1)
    """Fraction of memory bandwidth, for decode attention."""
    all_reduce_bandwidth: float = Field(default=0.69, gt=0, le=1)
    """Fraction of link bandwidth, for a large all-reduce."""
    all_reduce_s: float = Field(default=3.6e-6, ge=0)
    """Latency of a small all-reduce."""
    all_reduce_ramp_s: float = Field(default=2.5e-6, ge=0)
    """Extra seconds of a large all-reduce per further device, for synchronization between kernels."""
    all_reduce_ramp_bytes: float = Field(default=1.28e6, gt=0)
    """Bytes per device at which an all-reduce takes half of `all_reduce_ramp_s`."""
    collective_bandwidth: float = Field(default=0.75, gt=0, le=1)
    """Fraction of link bandwidth, for all-to-all, pipeline hops and transfers between workers."""
    collective_s: float = Field(default=13.6e-6, ge=0)
    """Latency of one such collective."""
    attention_s: float = Field(default=7e-6, ge=0)
    layer_s: float = Field(default=38.3e-6, ge=0)
    """Kernel launches of a layer that are not overlapped."""
    step_s: float = Field(default=0.24e-3, ge=0)
    """Scheduling and sampling of a step."""
    overlap: float = Field(default=4.0, ge=1)
    """Exponent of the smooth maximum: 1 adds, infinity takes the larger."""
    activation_passes: float = Field(default=12.0, ge=0)
    """Times that a layer reads or writes its hidden states."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Fraction of device memory for weights and KV."""
    storage_bytes_per_s: dict[Tier, float] = Field(
        default={Tier.HOST: 40e9, Tier.DISK: 5e9, Tier.OBJECT: 1e9}
    )
    """Onboarding speed of lower tiers: PCIe 5.0 x16 as measured, an NVMe drive, one object-store stream."""


_LOW_LATENCY_TOKENS = 256
"""Tokens per device up to which all-to-all uses the low-latency kernels, which send each copy separately."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives of one engine. `row_bytes` is the size of one token's hidden state in an all-reduce."""

    hardware: Hardware
    factors: Factors
    parallel: Parallel
    hidden: int
    row_bytes: float

    def all_reduce_s(self, rows: float) -> float:
        """Seconds of one all-reduce of `rows` hidden states over the tensor-parallel devices.

        The cost has three parts: a latency, a ramp while one kernel becomes several that wait for each other, and the
        link.

        Source: all-reduces of TensorRT-LLM and vLLM that aiconfigurator measured on H100, H200 and GB200
        (`tests/data/all_reduce_tables.json`); the form is within a third of most of them, from 4 KiB to 256 MiB.
        """
        tp, factors = self.parallel.tp, self.factors
        if tp == 1:
            return 0.0
        sent = rows * self.row_bytes * 2 * (tp - 1) / tp
        ramp_s = factors.all_reduce_ramp_s * (tp - 1) * sent / (sent + factors.all_reduce_ramp_bytes)
        link = self._link_bytes_per_s(tp) * factors.all_reduce_bandwidth
        return factors.all_reduce_s + ramp_s + sent / link

    def all_to_all_s(self, moe: Moe, tokens: float) -> float:
        """Seconds to send each device's tokens to their experts in 8 bits and back in 16 bits; NVLink and network overlap.

        Few tokens cross the network once per expert. Many tokens cross once per NVLink domain with some of their experts
        and are forwarded within it.

        Source: DeepEP (DeepSeek, 2025), its low-latency and its normal kernels.
        """
        ep, reached = self.parallel.ep, self.factors.collective_bandwidth
        token_bytes = tokens * self.hidden * (1 + 2)
        domain = min(ep, self.hardware.scale_up_devices)
        rate = reached * self.hardware.scale_up_bytes_per_s
        within = moe.experts_per_token * (domain - 1) / domain * token_bytes / rate
        domains = ep / domain
        limit = min(domains, moe.expert_groups_per_token or domains)
        hit = limit * (1 - (1 - 1 / limit) ** moe.experts_per_token)
        rate = reached * self.hardware.scale_out_bytes_per_s
        copies = max(hit, moe.experts_per_token * min(1.0, _LOW_LATENCY_TOKENS / tokens))
        across = copies * (1 - 1 / domains) * token_bytes / rate
        return 2 * self.factors.collective_s + max(within, across)

    def hop_s(self, rows: float) -> float:
        """Seconds to send `rows` hidden states to the next pipeline stage."""
        if self.parallel.pp == 1:
            return 0.0
        sent = rows * self.row_bytes / self.parallel.tp
        link = self._link_bytes_per_s(self.parallel.devices) * self.factors.collective_bandwidth
        return self.factors.collective_s + sent / link

    def _link_bytes_per_s(self, devices: int) -> float:
        """Give the bandwidth of the slowest link among `devices` neighbours."""
        fits = devices <= self.hardware.scale_up_devices
        return self.hardware.scale_up_bytes_per_s if fits else self.hardware.scale_out_bytes_per_s


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times `params` weights, at up to the fraction `reached` of `flops_per_s`, and half of it at `half_rows` rows.

    Reading the weights takes `traffic_s`; `overlap` is the exponent of the smooth maximum of both times.
    """

    params: float
    flops_per_s: float
    reached: float
    half_rows: float
    traffic_s: float
    overlap: float

    def seconds(self, rows: float) -> float:
        """Seconds of the product of `rows` rows; 0 for 0 rows."""
        if rows <= 0 or self.params <= 0:
            return 0.0
        reached = self.reached * rows / (rows + self.half_rows)
        arithmetic_s = 2 * rows * self.params / (self.flops_per_s * reached)
        if arithmetic_s > self.traffic_s:
            larger_s, smaller_s = arithmetic_s, self.traffic_s
        else:
            larger_s, smaller_s = self.traffic_s, arithmetic_s
        return float(larger_s * (1 + (smaller_s / larger_s) ** self.overlap) ** (1 / self.overlap))


@dataclass(slots=True)
class Roofline:
    """A `LatencyModel` of one engine. Immutable after construction."""

    shape: ModelShape
    hardware: Hardware
    parallel: Parallel = field(default_factory=Parallel)
    weight_dtype: Dtype | None = None
    kv_dtype: Dtype | None = None
    factors: Factors = field(default_factory=Factors)
    tokens_per_step: float = 1.0
    """Mean tokens per decode step and sequence; above 1 with speculative decoding."""
    draft_tokens: int | None = None
    """Tokens drafted and verified per step and sequence; None is the fewest that can yield `tokens_per_step`. Drafting a
        token costs one more layer and the head, as with multi-token prediction and EAGLE."""
    expert_dtype: Dtype | None = None
    """Format of routed experts; None is `weight_dtype` if given, else the checkpoint's. Must be None without experts."""
    frees_windows: bool = True
    """Whether the engine frees KV that fell out of a sliding window; False: all layers keep the whole context."""
    _kv: KvFootprint = field(init=False, repr=False)
    _attention: Attention = field(init=False, repr=False)
    _dense: Product = field(init=False, repr=False)
    """One dense layer."""
    _shared: Product = field(init=False, repr=False)
    """The parts of one MoE layer that every token uses."""
    _head: Product = field(init=False, repr=False)
    _wide_bytes: float = field(init=False, repr=False)
    _layers: int = field(init=False, repr=False)
    _dense_layers: int = field(init=False, repr=False)
    _launches_s: float = field(init=False, repr=False)
    """Fixed seconds of a layer."""
    _bytes_per_s: float = field(init=False, repr=False)
    """Reached memory bandwidth."""
    _collectives: Collectives = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.shape.moe is not None:
            self.expert_dtype = self.expert_dtype or self.weight_dtype or self.shape.expert_dtype
        elif self.expert_dtype is not None:
            raise ConfigError(
                f"expert_dtype: {self.expert_dtype} needs a model with experts; {self.shape.name} has none"
            )
        self.weight_dtype = self.weight_dtype or self.shape.weight_dtype
        wide = Dtype.FP8 if self.weight_dtype in {Dtype.FP8, Dtype.NVFP4, Dtype.MXFP4} else Dtype.BF16
        self.kv_dtype = self.kv_dtype or (Dtype.FP32 if self.weight_dtype is Dtype.FP32 else wide)
        self._check_parallel()
        self._check_speculation()
        self._prepare(self.weight_dtype, self.kv_dtype)

    def _prepare(self, dtype: Dtype, kv_dtype: Dtype) -> None:
        """Precompute the constant parts of step times."""
        shape, hardware, factors, tp = self.shape, self.hardware, self.factors, self.parallel.tp
        self._wide_bytes = self._wide.bytes
        self._layers, self._dense_layers = shape.layers, shape.layers - shape.moe_layers
        self._launches_s = factors.layer_s + factors.attention_s
        self._bytes_per_s = hardware.bandwidth_bytes_per_s * factors.bandwidth
        self._kv = (
            shape.kv_footprint(kv_dtype)
            if self.frees_windows
            else KvFootprint(shape.kv_bytes_per_token(kv_dtype))
        )
        self._collectives = Collectives(
            hardware, factors, self.parallel, shape.hidden, shape.hidden * self._wide_bytes
        )
        self._attention = Attention(
            windows=tuple(Counter(shape.windows).items()),
            flops_per_pair=shape.attention_flops_per_pair(),
            decode_flops_per_pair=shape.attention_flops_per_pair(absorbed=True),
            kv_elements_per_token=shape.kv_elements_per_token(),
            kv_element_bytes=kv_dtype.bytes,
            devices=tp,
            kv_shards=self._kv_shards(),
            flops_per_s=hardware.peak_flops_per_s(self._wide) * factors.attention,
            kv_bytes_per_s=hardware.bandwidth_bytes_per_s * factors.kv_bandwidth,
        )
        attention = shape.attention_params() / tp
        shared = 0 if shape.moe is None else shape.ffn_params(shape.moe.shared_intermediate)
        self._dense = self._product(attention + shape.ffn_params(shape.intermediate) / tp, dtype)
        self._shared = self._product(attention + shared / tp, dtype)
        self._head = self._product(shape.head_params() / tp, self._wide)

    def _check_speculation(self) -> None:
        if self.tokens_per_step < 1:
            raise ConfigError(f"tokens_per_step: must be >= 1, got {self.tokens_per_step}")
        if self.draft_tokens is None:
            self.draft_tokens = math.ceil(self.tokens_per_step) - 1
        if not self.tokens_per_step <= 1 + self.draft_tokens:
            raise ConfigError(
                f"draft_tokens: {self.draft_tokens} drafted and one that is sure yield {1 + self.draft_tokens} tokens at"
                f" most, got tokens_per_step {self.tokens_per_step:g}; raise draft_tokens or lower it"
            )

    def _remedy(self) -> str:
        if self.shape.moe is None:
            return "raise tensor_parallel or pipeline_parallel"
        return "raise tensor_parallel, pipeline_parallel or expert_parallel"

    def _check_parallel(self) -> None:
        tp, pp, ep, dp = self.parallel.tp, self.parallel.pp, self.parallel.ep, self.parallel.dp
        if tp > self.shape.heads:
            raise ConfigError(
                f"tensor parallelism: {tp} devices cannot share {self.shape.heads} attention heads; at most one each"
            )
        if self.shape.heads % tp:
            raise ConfigError(
                f"tensor parallelism: {self.shape.heads} attention heads on {tp} devices are {self.shape.heads / tp:.2f}"
                f" each; take a tensor_parallel that divides {self.shape.heads}"
            )
        heads = self.shape.kv_heads
        if self.shape.mla is None and max(tp, heads) % min(tp, heads):
            raise ConfigError(
                f"tensor parallelism: {heads} KV heads on {tp} devices are neither split nor copied evenly; take a"
                f" tensor_parallel that divides {heads}, or a multiple of it"
            )
        if pp > self.shape.layers:
            raise ConfigError(
                f"pipeline parallelism: {pp} stages cannot share {self.shape.layers} layers; at most one each"
            )
        if ep == 1:
            return
        if self.shape.moe is None:
            raise ConfigError(
                f"expert parallelism: {ep} needs a model with experts; {self.shape.name} has none"
            )
        if ep % tp or tp * dp % ep:
            raise ConfigError(
                f"expert parallelism: must be a multiple of tensor parallelism ({tp}) that divides the {tp * dp} devices"
                f" of tensor times data parallelism, or 1, got {ep}"
            )
        if ep > self.shape.moe.num_experts:
            raise ConfigError(
                f"expert parallelism: {ep} devices cannot share {self.shape.moe.num_experts} experts; at most one each"
            )

    # ---- LatencyModel -----------------------------------------------------------------------------------

    @property
    def verified_tokens(self) -> int:
        """Tokens computed per decode step and sequence."""
        assert self.draft_tokens is not None, "since construction"
        return 1 + self.draft_tokens

    @property
    def kv_bytes_per_token(self) -> float:
        return self._kv.token_bytes

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of `kv_bytes_per_token` that fit beside the weights; raises ConfigError if the weights do not fit."""
        budget = self.hardware.memory_bytes * self.factors.memory_fraction
        weights = self.weight_bytes_per_device()
        if weights >= budget:
            raise ConfigError(
                f"{self.shape.name}: {weights / 1e9:.1f} GB of {self.weight_dtype} weights a device do not fit in "
                f"{self.factors.memory_fraction:.0%} of {self.hardware.name}'s {self.hardware.memory_bytes / 1e9:.0f} GB; {self._remedy()}"
            )
        shards = self.parallel.pp * self.parallel.dp * self._kv_shards()
        return int((budget - weights) * shards / self.kv_bytes_per_token)

    def kv_held_tokens(self, tokens: float) -> float:
        return self._kv.held_tokens(tokens)

    @property
    def kv_windows(self) -> tuple[tuple[int, float], ...]:
        """Sliding windows for which the engine keeps blocks of their own; see `KvFootprint`."""
        return self._kv.windows

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        return self.mixed_step_s([(new_tokens, cached_tokens)], 0, 0)

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.mixed_step_s(chunks, 0, 0)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.mixed_step_s((), batch, context_tokens)

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Seconds of one step; see `LatencyModel.mixed_step_s`.

        Decoding sequences are split into one micro-batch per pipeline stage: each starts its next token when it leaves the
        last stage, so no stage idles and a token takes one pass. Prompts are split the same way or not at all, whichever is
        sooner: of m micro-batches and p stages the last leaves after m + p - 1 stage times.
        """
        if not batch and not any(new for new, _ in chunks):
            return 0.0
        pass_s, stage_s = self._pass_s(chunks, batch, context_tokens, 1)
        pp = self.parallel.pp
        if chunks and pp > 1:
            idle_s = self._pass_s((), batch, context_tokens, 1)[1] if batch else 0.0
            cut_s, stage_s = self._pass_s(chunks, batch, context_tokens, pp)
            pass_s = min(pass_s, cut_s + (pp - 1) * (stage_s - idle_s))
        return pass_s + self.factors.step_s

    def _pass_s(
        self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int, parts: int
    ) -> tuple[float, float]:
        """Give a micro-batch's seconds (through the pipeline, in one stage), with prompts split into `parts`."""
        news = [new for new, _ in chunks]
        queries = batch * self.verified_tokens
        pp, copies = self.parallel.pp, self.parallel.pp * self.parallel.dp
        rows = self._fullest(news) / parts + queries / copies
        prompts = max(len(chunks) / self.parallel.dp, min(len(chunks), 1)) / parts
        seconds = self._layers_s(rows, sum(news) / parts + queries / pp)
        seconds += self._head.seconds(prompts + queries / copies)
        if chunks:
            seconds += self._prefill_attention_s(chunks) / parts
        if batch:
            per_copy = batch / copies
            seconds += self._attention.decode_s(queries / copies, per_copy, context_tokens / copies)
            if drafted := self.verified_tokens - 1:
                seconds += drafted * self._draft_s(per_copy, batch / pp, context_tokens / copies)
        hop_s = self._collectives.hop_s(rows)
        return seconds + (pp - 1) * hop_s, seconds / pp + hop_s

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        if tier is Tier.DEVICE or num_bytes <= 0:
            return 0.0
        return self.factors.collective_s + num_bytes / self.factors.storage_bytes_per_s[tier]

    # ---- parts -------------------------------------------------------------------------------------------

    def weight_bytes_per_device(self) -> float:
        """Weight bytes on the fullest device; embeddings and head stay 16-bit."""
        assert self.weight_dtype is not None
        parallel, shape = self.parallel, self.shape
        body = shape.dense_params() / parallel.tp * self.weight_dtype.bytes
        if shape.moe is not None:
            assert self.expert_dtype is not None
            experts = shape.moe_layers * self._experts_per_device() * shape.expert_params()
            body += experts * self.expert_dtype.bytes
        head = shape.head_params() * (1 if shape.tied_embeddings else 2) / parallel.tp
        return body / parallel.pp + head * max(2.0, self._wide.bytes)

    def _experts_per_device(self) -> float:
        """Experts of a layer per device, rounded up: some are replicated if they do not divide evenly."""
        assert self.shape.moe is not None
        ep, experts = self.parallel.ep, self.shape.moe.num_experts
        return math.ceil(experts / ep) if ep > 1 else experts / self.parallel.tp

    @property
    def _wide(self) -> Dtype:
        """Format of activations, head and attention arithmetic."""
        return Dtype.FP32 if self.weight_dtype is Dtype.FP32 else Dtype.BF16

    @property
    def kv_copies(self) -> float:
        """Devices of a tensor-parallel group that hold the same KV."""
        return self.parallel.tp / self._kv_shards()

    def _kv_shards(self) -> int:
        """Devices over which one sequence's KV is split: by KV head; MLA's latent is replicated."""
        return 1 if self.shape.mla is not None else min(self.parallel.tp, self.shape.kv_heads)

    def _product(self, params: float, dtype: Dtype, loaded_params: float | None = None) -> Product:
        """Make a product with `params` weights, of which `loaded_params` are read."""
        hardware, factors = self.hardware, self.factors
        loaded = params if loaded_params is None else loaded_params
        return Product(
            params=params,
            flops_per_s=hardware.peak_flops_per_s(dtype),
            reached=factors.gemm if dtype.bytes >= Dtype.BF16.bytes else factors.gemm_narrow,
            half_rows=factors.gemm_half_rows,
            traffic_s=loaded * dtype.bytes / self._bytes_per_s,
            overlap=factors.overlap,
        )

    def _layers_s(self, rows: float, tokens: float) -> float:
        """Seconds of all layers without attention, for `rows` tokens on the fullest data-parallel copy and `tokens` on all."""
        seconds = self._layers * self._each_layer_s(rows)
        seconds += self._dense_layers * self._dense.seconds(rows)
        if self.shape.moe is not None:
            moe_layers = self._layers - self._dense_layers
            seconds += moe_layers * (self._shared.seconds(rows) + self._experts_s(rows, tokens))
        return seconds

    def _each_layer_s(self, rows: float) -> float:
        """Seconds of the parts that dense and MoE layers share: launches, hidden states, two all-reduces."""
        return self._launches_s + self._activations_s(rows) + 2 * self._collectives.all_reduce_s(rows)

    def _draft_s(self, rows: float, tokens: float, context_tokens: float) -> float:
        """Seconds to draft one token per sequence: one more layer, the head, and the layer's KV."""
        seconds = self._each_layer_s(rows) + self._head.seconds(rows)
        seconds += self._attention.decode_s(rows, rows, context_tokens) / self._layers
        if self.shape.moe is None:
            return seconds + self._dense.seconds(rows)
        return seconds + self._shared.seconds(rows) + self._experts_s(rows, tokens)

    def _experts_s(self, rows: float, tokens: float) -> float:
        """Seconds of one layer's routed experts: products with the experts hit, and the all-to-all.

        Experts are assumed equally likely: of E experts, n tokens with k each hit
        `E * (1 - (1 - k/E)^n)`.
        """
        moe, parallel = self.shape.moe, self.parallel
        assert moe is not None
        assert self.expert_dtype is not None
        # With fewer expert-parallel devices than devices, the experts are replicated, each copy with its share of tokens.
        share = parallel.ep / (parallel.tp * parallel.dp) if parallel.ep > 1 else rows / tokens
        group_tokens = tokens * share
        hit = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** group_tokens)
        pairs = group_tokens * moe.experts_per_token
        # A device's experts are one grouped product: rows per expert decide its efficiency.
        params = hit * self.shape.expert_params()
        loaded = params / moe.num_experts * self._experts_per_device()
        params /= parallel.ep if parallel.ep > 1 else parallel.tp
        seconds = self._product(params, self.expert_dtype, loaded).seconds(pairs / hit)
        if parallel.ep > 1:
            seconds += self._collectives.all_to_all_s(moe, rows / parallel.tp)
        return seconds

    def _fullest(self, prompts: Sequence[float]) -> float:
        """Give the load of the fullest data-parallel copy, which the others wait for; each prompt goes to the emptiest copy."""
        copies = self.parallel.dp
        if copies == 1:
            return sum(prompts)
        if len(prompts) <= copies:
            return max(prompts, default=0.0)
        loads = [0.0] * copies
        for prompt in sorted(prompts, reverse=True):
            heapq.heapreplace(loads, loads[0] + prompt)
        return max(loads)

    def _activations_s(self, rows: float) -> float:
        moved = self.factors.activation_passes * rows * self.shape.hidden * self._wide_bytes
        return moved / self._bytes_per_s

    def _prefill_attention_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of attention of all chunks and layers, on the data-parallel copy with the most."""
        pairs = 0.0
        for window, count in self._attention.windows:
            pairs += count * self._fullest([causal_pairs(new, cached, window) for new, cached in chunks])
        return self._attention.prefill_s(pairs)


def price_per_token(roofline: Roofline) -> "Roofline | SpeculativeModel":
    """Make a latency model whose decode steps yield one token per sequence."""
    return roofline if roofline.tokens_per_step == 1 else SpeculativeModel(roofline)


class SpeculativeModel:
    """A `LatencyModel` whose decode step is the roofline's divided by `tokens_per_step`. Immutable.

    A step with prompts also yields one token and is charged only that token's share of decoding. Sums over a run are
    right; each such step is too short by at most the rest of a decode step.
    """

    def __init__(self, roofline: Roofline) -> None:
        self._step = roofline
        self._part = 1 / roofline.tokens_per_step

    @property
    def parallel(self) -> Parallel:
        return self._step.parallel

    @property
    def verified_tokens(self) -> int:
        return self._step.verified_tokens

    @property
    def kv_bytes_per_token(self) -> float:
        return self._step.kv_bytes_per_token

    @property
    def kv_capacity_tokens(self) -> int:
        return self._step.kv_capacity_tokens

    def kv_held_tokens(self, tokens: float) -> float:
        return self._step.kv_held_tokens(tokens)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        return self._step.prefill_s(new_tokens, cached_tokens)

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self._step.prefill_batch_s(chunks)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one token per sequence: a share of the real step."""
        return self._part * self._step.decode_step_s(batch, context_tokens)

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Seconds of prompts and one token per sequence."""
        decode_s = self._step.decode_step_s(batch, context_tokens)
        return self._step.mixed_step_s(chunks, batch, context_tokens) - (1 - self._part) * decode_s

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        return self._step.onboard_s(num_bytes, tier)
