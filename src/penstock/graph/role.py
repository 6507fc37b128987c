"""The workers of one role: replicas, engine, hardware, parallelism, KV."""

import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import pydantic

from penstock.core.config import Config, nearest, wrong
from penstock.core.document import check_plain
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Location, Role
from penstock.engine.kv_tiers import KvConfig
from penstock.engine.mock import MockConfig
from penstock.engine.registry import check_engine_name, engine_kind, engine_names
from penstock.engine.scheduling.config import AGEING, Order
from penstock.graph.kubernetes import KubernetesSpec
from penstock.kv.retention import RetentionConfig
from penstock.perf.hardware import find_hardware

Dtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "mxfp4", "nvfp4"]
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNFOLDED = {"name": "engine", "args": "engine_args"}
"""Fields of a role by their names in the mapping `engine`."""


def _known_hardware(name: str) -> str:
    try:
        return find_hardware(name).name
    except ConfigError as error:
        raise wrong(error.message.removeprefix("hardware: ")) from error


HardwareName = Annotated[str, pydantic.AfterValidator(_known_hardware)]
"""A device type, by its name in `penstock.perf.hardware`."""


class RoleSpec(Config):
    """The workers of one role, all alike."""

    not_here: ClassVar[dict[str, str]] = {
        "block_size": "all roles of a graph have blocks of one size, since the hashes by which KV is found and transferred"
        " are per block size; set block_size beside model",
        "model": "all roles of a graph run one model, since KV is of one model; set model beside roles",
    }

    replicas: int = pydantic.Field(default=1, ge=0)
    """Workers to start; 0 declares a role that workers may change to, or join from elsewhere."""
    replicas_max: int | None = pydantic.Field(default=None, ge=1)
    """Most workers that scaling gives this role, for which memory of the host is set aside from the start; None is as many as devices, cores and the router allow."""
    engine: str = "paged"
    """`paged` runs the model in PyTorch; `mock` generates synthetic text at a modelled speed; `vllm` runs it in vLLM; `openai` is a running server (docs/engines.md); `sglang` and `trtllm` run it in SGLang and TensorRT-LLM, on GPUs; `package.module:make` is an engine of your own. A mapping `{name, args, ...}` sets `engine`, `engine_args` and other fields of the role, such as `tensor_parallel`."""
    engine_args: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Arguments of the engine by its own names, as vLLM's `gpu_memory_utilization`; the engine refuses those that it does not know."""
    hardware: HardwareName = "cpu"
    """Device type of a worker, by its name in `penstock.perf.hardware`."""
    usd_per_hour: float | None = pydantic.Field(default=None, gt=0, le=1000)
    """Price of one device in US dollars per hour; None is the catalogue's. For simulations and the planner's budget."""
    watts: float | None = pydantic.Field(default=None, gt=0, le=100_000)
    """Power of one device with its share of host, network and cooling, in watts; None is the catalogue's. For simulations."""
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    """Devices over which each layer's weights are split."""
    pipeline_parallel: int = pydantic.Field(default=1, ge=1)
    """Pipeline stages over which the layers are split; a worker has tensor x pipeline x data parallel devices."""
    data_parallel: int = pydantic.Field(default=1, ge=1)
    """Copies of attention and dense layers in one worker, each with its own sequences and KV; routers choose among these ranks as among workers."""
    expert_parallel: int = pydantic.Field(default=1, ge=1)
    """Devices of a stage over which whole experts are distributed; a multiple of `tensor_parallel` that divides tensor x data parallel. 1: each expert is split by `tensor_parallel`."""
    nodes: int = pydantic.Field(default=1, ge=1, le=64)
    """Nodes that one worker spans, as vLLM's `nnodes`, with an equal number of its devices on each; engines `vllm`, `sglang` and `mock`. Each node runs `penstock up` (docs/many-machines.md)."""
    weight_dtype: Dtype = "auto"
    """Number format of the weights: float32 (or fp32), bfloat16 (bf16), float16 (fp16), fp8, int8, mxfp4, nvfp4, as far as the engine supports it; auto is the checkpoint's."""
    expert_dtype: Dtype = "auto"
    """Number format of routed experts, as for `weight_dtype`; auto is that of the weights."""
    kv_dtype: Dtype = "auto"
    """Number format of the KV cache, as for `weight_dtype`; auto is that of the weights, or fp8 if the weights are narrower."""
    max_batch_tokens: int | None = pydantic.Field(default=None, ge=1)
    """Most tokens of one engine step on each data-parallel rank, and so of one prefill chunk; None is the engine's default, and for prefill workers the smallest step at full utilization."""
    max_running_requests: int | None = pydantic.Field(default=None, ge=1)
    """Most requests in the batch of each data-parallel rank; None is the engine's default."""
    max_waiting_requests: int | None = pydantic.Field(default=None, ge=1)
    """Most requests that wait in a worker before it refuses more; None is the engine's default. Simulated workers have no limit."""
    prompt_order: Order | None = None
    """Order of prompts: `fcfs`, first come first served; `shortest`, fewest missing tokens first, less an ageing credit. None is fcfs for aggregated workers, else shortest."""
    prompt_ageing: float = pydantic.Field(default=AGEING, gt=0, le=1)
    """Ageing credit of `shortest`, in tokens per token that the worker computes meanwhile. A prompt that lacks n tokens is overtaken only by prompts that arrive within the next n / prompt_ageing computed tokens."""
    kv_blocks: int | None = pydantic.Field(default=None, ge=2)
    """Blocks in a worker's KV pool; None is the engine's default."""
    kv: KvConfig = KvConfig()
    """KV tiers below the devices of each worker, as `{host: 8GiB}`."""
    retention: RetentionConfig = RetentionConfig()
    """Bounds of the KV that operators pin and clients ask to keep, on engines `paged` and `mock`."""
    profile: str | None = pydantic.Field(default=None, min_length=1)
    """File written by `penstock profile` for such a worker, relative to the graph; routers then estimate latency from it instead of the hardware's data sheet."""
    locations: tuple[Location, ...] = ()
    """Locations of the workers, assigned round-robin; the environment of a worker's process overrides it (`PENSTOCK_REGION`, `_ZONE`, `_RACK`, `_HOST`)."""
    tokens_per_step: float = pydantic.Field(default=1.0, ge=1, le=32)
    """Mean tokens per decode step and request: more than 1 with speculative decoding. Only simulated."""
    draft_tokens: int | None = pydantic.Field(default=None, ge=0, le=31)
    """Tokens drafted and verified per decode step and request; None is the fewest that can yield `tokens_per_step`. Only simulated."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters, which clients request as a model; the mock engine accepts any, the paged engine none yet."""
    adapters_per_worker: int | None = pydantic.Field(default=None, ge=1)
    """Adapters per worker, distributed evenly over the replicas; None is all."""
    mock: MockConfig = MockConfig()
    """Settings of the mock engine."""
    kubernetes: KubernetesSpec | None = None
    """What the role's pods get in Kubernetes beside what the graph's `kubernetes` gives all pods."""

    @property
    def devices(self) -> int:
        """Devices of one worker."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def devices_per_node(self) -> int:
        """Devices of one worker on each of its nodes."""
        return self.devices // self.nodes

    @property
    def replicas_most(self) -> int:
        """Workers to set aside memory for."""
        return max(self.replicas, self.replicas_max or 0)

    def location_of(self, index: int) -> Location:
        """Give the location of the role's worker `index`, from 0."""
        return self.locations[index % len(self.locations)] if self.locations else Location()

    def adapters_of(self, index: int) -> tuple[str, ...]:
        """Give the adapters of the role's worker `index`, from 0."""
        names = self.adapters
        if self.adapters_per_worker is None or self.adapters_per_worker >= len(names):
            return names
        first = index * self.adapters_per_worker
        return tuple(names[(first + number) % len(names)] for number in range(self.adapters_per_worker))

    @pydantic.model_validator(mode="before")
    @classmethod
    def _unfold_engine(cls, data: Any) -> Any:
        engine = data.get("engine") if isinstance(data, dict) else None
        if not isinstance(engine, dict):
            return _with_replicas(data) if isinstance(data, dict) else data
        if not isinstance(engine.get("name"), str):
            raise wrong(
                f"engine: must be a name, or a mapping with name, as {{name: vllm, args: {{}}}}, got {engine!r}"
            )
        fields: dict[str, Any] = {_UNFOLDED.get(str(key), str(key)): value for key, value in engine.items()}
        twice = sorted((fields.keys() & data.keys()) - {"engine"})
        if twice:
            raise wrong(f"{twice[0]}: is set in engine and beside it; leave one of the two out")
        return _with_replicas({**data, **fields})

    @pydantic.model_validator(mode="after")
    def _check_replicas(self) -> Self:
        count = _workers_of(self.engine, self.engine_args)
        if count is not None and self.replicas not in {0, count}:
            raise wrong(
                f"replicas: engine {self.engine!r} has one worker for each url, {count}, got {self.replicas}; leave replicas out"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_replicas_max(self) -> Self:
        if self.replicas_max is not None and self.replicas_max < self.replicas:
            raise wrong(
                f"replicas_max: must be >= replicas {self.replicas}, got {self.replicas_max}; raise it or lower replicas"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.nodes == 1:
            return self
        spanning = [name for name in engine_names() if engine_kind(name).follow is not None]
        if self.engine not in spanning:
            raise wrong(
                f"nodes: a worker of engine {self.engine!r} is on one node, got {self.nodes}; use"
                f" {', '.join(spanning[:-1])} or {spanning[-1]}, or start"
                " such workers as servers of their engine and name these by engine openai"
            )
        if self.devices % self.nodes:
            raise wrong(
                f"nodes: {self.devices} devices (tensor x pipeline parallel) are no equal parts on {self.nodes} nodes; set"
                f" tensor_parallel or pipeline_parallel so that {self.nodes} divides their product"
            )
        if self.data_parallel > 1:
            raise wrong(
                f"nodes: data-parallel ranks of one worker are on one node, got data_parallel {self.data_parallel} on {self.nodes}"
                " nodes; use replicas"
            )
        if self.kv.present():
            raise wrong(
                f"nodes: KV tiers ({', '.join(self.kv.present())}) are of one node, got {self.nodes} nodes; leave kv out"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.adapters and self.engine in engine_names() and not engine_kind(self.engine).has_adapters:
            raise wrong(
                f"adapters: engine {self.engine!r} runs none; run one that does: {_listed_with_adapters()}"
            )
        for name in self.adapters:
            if not _ADAPTER.fullmatch(name):
                raise wrong(
                    f"adapters: must be up to 128 letters, digits, '.', '_', '-', '/' or ':', the first a letter or digit,"
                    f" got {name!r}"
                )
            if self.adapters.count(name) > 1:
                raise wrong(f"adapters: {name!r} is named twice; keep one")
        per_worker = self.adapters_per_worker
        if per_worker is not None and self.replicas and per_worker * self.replicas < len(self.adapters):
            raise wrong(
                f"adapters_per_worker: {self.replicas} workers with {per_worker} adapters each cannot have all"
                f" {len(self.adapters)}; raise it or replicas"
            )
        return self

    @pydantic.field_validator("engine")
    @classmethod
    def _check_engine(cls, engine: str) -> str:
        try:
            check_engine_name(engine)
        except ConfigError as error:
            raise wrong(error.message) from error
        return engine

    @pydantic.field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, engine_args: dict[str, Any]) -> dict[str, Any]:
        check_plain(engine_args, use="which go to a worker as JSON")
        return engine_args

    @pydantic.field_validator("tokens_per_step")
    @classmethod
    def _check_speculation(cls, tokens_per_step: float, info: pydantic.ValidationInfo) -> float:
        if tokens_per_step > 1 and info.data.get("engine") == "paged":
            raise wrong(
                f"must be 1 with engine 'paged', which does not speculate, got {tokens_per_step:g}; engine 'mock' takes"
                " any, to be simulated"
            )
        if tokens_per_step > 1 and (profile := info.data.get("profile")) is not None:
            raise wrong(
                f"must be 1 with a profile, got {tokens_per_step:g}: {profile} says the time between two tokens, what"
                " speculation saves included; leave one of the two out"
            )
        return tokens_per_step

    @pydantic.field_validator("draft_tokens")
    @classmethod
    def _check_drafts(cls, draft_tokens: int | None, info: pydantic.ValidationInfo) -> int | None:
        yielded = info.data.get("tokens_per_step", 1.0)
        if draft_tokens is not None and yielded > 1 + draft_tokens:
            raise wrong(
                f"must be >= {math.ceil(yielded) - 1}, as {draft_tokens} drafted and one that is sure cannot yield"
                f" tokens_per_step {yielded:g}, got {draft_tokens}"
            )
        if draft_tokens and yielded == 1:
            raise wrong(
                f"must be left out where tokens_per_step is 1, got {draft_tokens}; say what drafts yield there"
            )
        return draft_tokens

    @property
    def verified_tokens(self) -> int:
        """Tokens computed per decode step and request."""
        drafted = math.ceil(self.tokens_per_step) - 1 if self.draft_tokens is None else self.draft_tokens
        return 1 + drafted

    @pydantic.field_validator("weight_dtype", "expert_dtype", "kv_dtype", mode="before")
    @classmethod
    def _read_dtype(cls, dtype: Any) -> Any:
        known = [*get_args(Dtype), *_SHORT]
        if isinstance(dtype, str) and dtype not in known:
            hint = nearest(dtype, known) if dtype != "fp4" else "; did you mean 'nvfp4' or 'mxfp4'?"
            raise wrong(f"there is no number format {dtype!r}{hint}")
        return _SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype

    @pydantic.field_validator("weight_dtype", "expert_dtype", "kv_dtype")
    @classmethod
    def _check_dtype(cls, dtype: Dtype, info: pydantic.ValidationInfo) -> Dtype:
        engine = info.data.get("engine", "")
        known = engine_kind(engine).dtypes if engine in engine_names() else None
        if known is not None and dtype not in known:
            *names, last = map(repr, known)
            raise wrong(
                f"must be one of {', '.join(names)} or {last} with engine {engine!r}, got {dtype!r};"
                " engine 'mock' takes any, to be simulated"
            )
        return dtype


def _workers_of(engine: Any, args: Any) -> int | None:
    """Give the number of workers that the engine's arguments are for; None where they do not say."""
    if engine not in engine_names() or not isinstance(args, dict):
        return None
    count = engine_kind(engine).count_workers
    return None if count is None else count(args)


def _with_replicas(data: dict[str, Any]) -> dict[str, Any]:
    """Fill in `replicas` where the engine's arguments say how many workers they are for."""
    count = _workers_of(data.get("engine"), data.get("engine_args"))
    return data if count is None or "replicas" in data else {**data, "replicas": count}


def _listed_with_adapters() -> str:
    return ", ".join(name for name in engine_names() if engine_kind(name).has_adapters)


class Roles(Config):
    """Workers by role: aggregated, disaggregated (prefill and decode), or both together."""

    aggregated: RoleSpec | None = None
    """Workers that run prefill and decode of a request."""
    prefill: RoleSpec | None = None
    """Workers that run prefill only; their KV is transferred to decode workers."""
    decode: RoleSpec | None = None
    """Workers that receive KV and decode."""

    def present(self) -> dict[Role, RoleSpec]:
        """Return the declared roles, including those with 0 replicas."""
        specs = {
            Role.AGGREGATED: self.aggregated, Role.PREFILL: self.prefill, Role.DECODE: self.decode,
        }  # fmt: skip
        return {role: spec for role, spec in specs.items() if spec is not None}
