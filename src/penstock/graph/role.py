"""What the workers of one role are: how many, which engine, on what, with how much KV."""

import math
import re
from typing import Any, ClassVar, Literal, Self, get_args

import pydantic

from penstock.core.config import Config, nearest, wrong
from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.core.types.instances import Role
from penstock.core.types.location import Location
from penstock.engine.mock.engine import MockConfig
from penstock.engine.registry import SIMULATED_ONLY, engine_dtypes, engine_names
from penstock.engine.scheduling.config import AGEING, Order
from penstock.perf.model.hardware import find_hardware

Dtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "mxfp4", "nvfp4"]
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


_TIER_MAX = 10_000.0


class KvTiers(Config):
    """KV that workers keep beneath their devices, in blocks for each block on the device; 0 is none."""

    host: float = pydantic.Field(default=0.0, ge=0, le=_TIER_MAX)
    """In the host's memory: what the devices give up goes here first."""
    disk: float = pydantic.Field(default=0.0, ge=0, le=_TIER_MAX)
    """On a local drive: what host memory gives up."""
    object: float = pydantic.Field(default=0.0, ge=0, le=_TIER_MAX)
    """In an object store: what the drive gives up."""

    def present(self) -> dict[Tier, float]:
        """Return the tiers that are there, nearest first."""
        sizes = {Tier.HOST: self.host, Tier.DISK: self.disk, Tier.OBJECT: self.object}
        return {tier: size for tier, size in sizes.items() if size}


class RoleSpec(Config):
    """One role's workers, all alike."""

    not_here: ClassVar[dict[str, str]] = {
        "block_size": "all roles of a graph have blocks of one size, since the hashes by which KV is found and handed over"
        " are per block size; set block_size beside model",
        "model": "all roles of a graph run one model, since KV is of one model; set model beside roles",
    }

    replicas: int = pydantic.Field(default=1, ge=0)
    """Workers to run; 0 describes a role that workers may change to, or come to from elsewhere."""
    engine: str = "paged"
    """`paged` runs the model in PyTorch; `mock` answers with made-up text at a modelled speed; `vllm`, `sglang` and `trtllm` are only simulated in this version."""
    hardware: str = "cpu"
    """What a worker's devices are, as the catalogue in `penstock.perf.model.hardware` names them."""
    usd_per_hour: float | None = pydantic.Field(default=None, gt=0, le=1000)
    """What one device costs, US dollars an hour; None is what the catalogue assumes. Only simulated."""
    watts: float | None = pydantic.Field(default=None, gt=0, le=100_000)
    """What one device draws with its share of host, network and cooling; None is what the catalogue says. Only simulated."""
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    """Devices that share each layer of a worker's weights."""
    pipeline_parallel: int = pydantic.Field(default=1, ge=1)
    """Stages that share a worker's layers; a worker has tensor x pipeline x data parallel devices."""
    data_parallel: int = pydantic.Field(default=1, ge=1)
    """Copies of attention and dense layers in one worker, each with its own sequences and KV."""
    expert_parallel: int = pydantic.Field(default=1, ge=1)
    """Devices of a stage that share a layer's experts out, each whole; a multiple of `tensor_parallel` that divides tensor x data parallel. 1 cuts each expert by `tensor_parallel`."""
    weight_dtype: Dtype = "auto"
    """Number format of the weights: float32 (or fp32), bfloat16 (bf16), float16 (fp16), fp8, int8, mxfp4, nvfp4, as far as the engine knows it; auto is the checkpoint's own."""
    expert_dtype: Dtype = "auto"
    """Number format of routed experts, as for `weight_dtype`; auto is that of the weights."""
    kv_dtype: Dtype = "auto"
    """Number format of the KV cache, as for `weight_dtype`; auto is that of the weights, or fp8 where they are narrower."""
    max_batch_tokens: int | None = pydantic.Field(default=None, ge=1)
    """Tokens one engine step may compute on each data-parallel rank, and so of one prompt; None is the engine's own choice, and of a prefill worker the fewest that keep it as busy as any number does."""
    max_running_requests: int | None = pydantic.Field(default=None, ge=1)
    """Requests in the batch of each data-parallel rank; None is the engine's own choice."""
    max_waiting_requests: int | None = pydantic.Field(default=None, ge=1)
    """Requests that wait in a worker for its batch, beyond which it refuses more; None is the engine's own choice. Simulated ones take any."""
    prompt_order: Order | None = None
    """Whose prompt is computed next: `fcfs`, who came first; `shortest`, who lacks the fewest tokens, less what waiting has earned. None is fcfs for aggregated workers, else shortest."""
    prompt_ageing: float = pydantic.Field(default=AGEING, gt=0, le=1)
    """For `shortest`: tokens that waiting earns a prompt for each that its worker computes. One that lacks n is overtaken by those that come while n / prompt_ageing are computed, and by none that come later."""
    kv_blocks: int | None = pydantic.Field(default=None, ge=2)
    """Blocks in a worker's KV pool; None is the engine's own choice."""
    kv_tiers: KvTiers = KvTiers()
    """KV beneath the devices of each worker; in this version simulated engines alone have any."""
    profile: str | None = pydantic.Field(default=None, min_length=1)
    """File that `penstock profile` wrote of such a worker, relative to the graph's; routers price work by it instead of by the hardware's data sheet alone."""
    locations: tuple[Location, ...] = ()
    """Where the workers are, each at the next location of this list, over and over; the environment of a worker's process overrides it (`PENSTOCK_REGION`, `_ZONE`, `_RACK`, `_HOST`)."""
    tokens_per_step: float = pydantic.Field(default=1.0, ge=1, le=32)
    """Tokens that a decode step yields of each request on average: more than 1 where the engine speculates and drafts are accepted. Only simulated."""
    draft_tokens: int | None = pydantic.Field(default=None, ge=0, le=31)
    """Tokens that a decode step drafts for each request and verifies, accepted or not; None is the fewest that can yield `tokens_per_step`. Only simulated."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters by name, which clients ask for as they ask for a model; the mock engine takes any, the paged one has none yet."""
    adapters_per_worker: int | None = pydantic.Field(default=None, ge=1)
    """How many of them each worker has, spread evenly over the replicas; None is all."""
    mock: MockConfig = MockConfig()
    """How the mock engine behaves."""

    @property
    def devices(self) -> int:
        """Devices of one worker."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    def location_of(self, index: int) -> Location:
        """Say where the worker of this number, from 0, is to be."""
        return self.locations[index % len(self.locations)] if self.locations else Location()

    def adapters_of(self, index: int) -> tuple[str, ...]:
        """Name the adapters of one of the replicas."""
        names = self.adapters
        if self.adapters_per_worker is None or self.adapters_per_worker >= len(names):
            return names
        first = index * self.adapters_per_worker
        return tuple(names[(first + number) % len(names)] for number in range(self.adapters_per_worker))

    @pydantic.model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.adapters and self.engine != "mock":
            raise wrong(f"adapters: engine {self.engine!r} runs none yet; engine 'mock' takes any")
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
        known = [*engine_names(), *SIMULATED_ONLY]
        if engine not in known:
            raise wrong(f"there is no engine {engine!r}{nearest(engine, known)}")
        return engine

    @pydantic.field_validator("hardware")
    @classmethod
    def _check_hardware(cls, hardware: str) -> str:
        try:
            return find_hardware(hardware).name
        except ConfigError as error:
            raise wrong(error.message.removeprefix("hardware: ")) from error

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
        """Tokens that a decode step computes for each request."""
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
        known = engine_dtypes(engine)
        if known is not None and dtype not in known:
            *names, last = map(repr, known)
            raise wrong(
                f"must be one of {', '.join(names)} or {last} with engine {engine!r}, got {dtype!r};"
                " engine 'mock' takes any, to be simulated"
            )
        return dtype


class Roles(Config):
    """Which kinds of worker there are: for whole requests (aggregated), for prefill and decode apart, or both beside each other."""

    aggregated: RoleSpec | None = None
    """Workers that run whole requests."""
    prefill: RoleSpec | None = None
    """Workers that run prompts and hand their KV over."""
    decode: RoleSpec | None = None
    """Workers that take KV over and generate."""

    def present(self) -> dict[Role, RoleSpec]:
        """Return the roles that are described, replicas 0 included."""
        specs = {
            Role.AGGREGATED: self.aggregated, Role.PREFILL: self.prefill, Role.DECODE: self.decode,
        }  # fmt: skip
        return {role: spec for role, spec in specs.items() if spec is not None}
