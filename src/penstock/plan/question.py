"""The question of a plan: model, devices, workload and targets; impossible ones are errors with the reason."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import yaml

from penstock.core.errors import ConfigError
from penstock.demo import MODEL_DIR
from penstock.graph import DEMO_MODEL, Graph, RoleSpec, Slo, build
from penstock.graph.engine_prices import make_roofline
from penstock.perf.hardware import Hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import ModelShape, Parallel, parallelisms
from penstock.perf.pool import Demand
from penstock.perf.roofline import Factors, Roofline
from penstock.perf.search import Layout, LayoutSearch, RoleLayout

DEVICES_MAX = 1024
BLOCK_SIZE = 64


@dataclass(kw_only=True)
class Question:
    """A valid question about a model that fits the devices.

    model:   the graph's `model`
    devices: number of devices of `hardware`
    demand:  workload and targets
    formats: `weight_dtype`, `expert_dtype` and `kv_dtype` of the graph's roles
    speculation: `tokens_per_step` and `draft_tokens` of the graph's roles
    """

    model: str
    hardware: Hardware
    devices: int
    demand: Demand
    formats: Mapping[str, str] = field(default_factory=dict)
    speculation: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that an answer is possible.

        Raises:
            ConfigError: it is not; the text has the arithmetic.
        """
        _check_number("--gpus", self.devices, DEVICES_MAX)
        _check_number("--isl", self.demand.input_tokens, self.shape.context_length)
        _check_number("--osl", self.demand.output_tokens, self.shape.context_length)
        for flag, target_s in (("--slo-ttft", self.demand.ttft_s), ("--slo-itl", self.demand.itl_s)):
            if not (math.isfinite(target_s) and target_s > 0):
                raise ConfigError(f"{flag}: must be > 0 seconds, got {target_s:g}")
        if not 0 < self.demand.percentile < 100:
            raise ConfigError(f"--percentile: must be > 0 and < 100, got {self.demand.percentile:g}")
        asked = self.demand.input_tokens + self.demand.output_tokens
        if asked > self.shape.context_length:
            raise ConfigError(
                f"--isl {self.demand.input_tokens} and --osl {self.demand.output_tokens}: {asked:,} tokens, and the context"
                f" of {self.model} is {self.shape.context_length:,}; lower one of them"
            )
        if not self.search().models:
            raise ConfigError(self._why_nothing_fits(asked))

    @cached_property
    def shape(self) -> ModelShape:
        return find_shape(str(MODEL_DIR) if self.model == DEMO_MODEL else self.model)

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.demand.ttft_s, itl_s=self.demand.itl_s, percentile=self.demand.percentile)

    def role(self, parallel: Parallel, **fields: Any) -> dict[str, Any]:
        """Make a graph's role with this parallelism; defaults are left out."""
        degrees = {
            "tensor_parallel": parallel.tp,
            "pipeline_parallel": parallel.pp,
            "data_parallel": parallel.dp,
            "expert_parallel": parallel.ep,
        }
        return {
            "engine": "mock",
            "hardware": self.hardware.name,
            **{name: degree for name, degree in degrees.items() if degree > 1},
            **{name: dtype for name, dtype in self.formats.items() if dtype != "auto"},
            **self.speculation,
            **fields,
        }

    def price(self, parallel: Parallel) -> Roofline:
        """Make the latency model of one worker.

        Raises:
            ConfigError: unknown number format, or the parallelism does not fit the model.
        """
        return make_roofline(self.shape, RoleSpec.parse(self.role(parallel), source=_flag))

    def link_bytes_per_s(self, prefill: Parallel, decode: Parallel) -> float:
        """Give the KV transfer bandwidth between two workers: pairs of their devices, over NVLink if it connects all devices."""
        reaches = self.devices <= self.hardware.scale_up_devices
        rate = self.hardware.scale_up_bytes_per_s if reaches else self.hardware.scale_out_bytes_per_s
        return rate * Factors().collective_bandwidth * min(prefill.devices, decode.devices)

    def search(self, demand: Demand | None = None) -> LayoutSearch:
        """Make the search for this demand, or for another one."""
        return LayoutSearch(
            price=self.price,
            choices=tuple(parallelisms(self.shape, self.hardware, devices_max=self.devices)),
            devices=self.devices,
            demand=demand or self.demand,
            block_size=BLOCK_SIZE,
            link_bytes_per_s=self.link_bytes_per_s,
        )

    def why_not(self) -> str:
        """Explain why no layout meets the targets, and what to change."""
        demand, models = self.demand, self.search().models
        ttft_s, prefill = min(
            ((model.prefill_s(demand.input_tokens), model) for model in models),
            key=lambda pair: pair[0],
        )
        itl_s, decode = min(
            ((model.decode_step_s(1, round(demand.context_tokens)), model) for model in models),
            key=lambda pair: pair[0],
        )
        late = [
            f"--slo-{name} {target_s:g}: {said} takes {best_s:.3g} s at best, on {parallel_name(model.parallel)} and nothing else"
            " to do"
            for name, target_s, said, best_s, model in (
                (
                    "ttft",
                    demand.ttft_s,
                    f"the first token after {demand.input_tokens:,} of prompt",
                    ttft_s,
                    prefill,
                ),
                ("itl", demand.itl_s, "a token", itl_s, decode),
            )
            if target_s < best_s
        ]
        if late:
            return "; ".join(late) + f"; raise {'it' if len(late) == 1 else 'them'}, or take faster hardware"
        return (
            f"--slo-ttft {demand.ttft_s:g} and --slo-itl {demand.itl_s:g}: no layout on {self.devices} {self.hardware.name} keeps"
            f" both for {demand.percentile:g} % of the requests at any rate worth having; alone on idle devices the first token"
            f" takes {ttft_s:.3g} s on {parallel_name(prefill.parallel)}, and each further one {itl_s:.3g} s on {parallel_name(decode.parallel)};"
            " raise one of them"
        )

    def _why_nothing_fits(self, asked: int) -> str:
        """Explain what is missing, with the best parallelism on these devices."""
        shares = list(self._shared(self.devices))
        widest = max((model for model in shares), key=lambda model: model.parallel.devices)
        usable = self.hardware.memory_bytes * widest.factors.memory_fraction
        weights = widest.weight_bytes_per_device()
        text = (
            f"{self.model} does not fit on {self.devices} {self.hardware.name}: {usable / 1e9:.1f} GB of a device are usable, and"
            f" with {parallel_name(widest.parallel)} {weights / 1e9:.1f} GB of it are {widest.weight_dtype} weights"
        )
        if weights < usable:
            text += f", which leaves room for {widest.kv_capacity_tokens:,} tokens of KV, and a request has {widest.kv_held_tokens(asked):,.0f}"
        enough = next((model.parallel for model in self._shared(DEVICES_MAX) if _holds(model, asked)), None)
        if enough is None:
            return f"{text}; take hardware with more memory, or narrower weights (--weight-dtype)"
        return f"{text}; {enough.devices} are enough ({parallel_name(enough)}), or take narrower weights (--weight-dtype)"

    def _shared(self, devices_max: int) -> Iterator[Roofline]:
        """Yield latency models of all parallelisms up to `devices_max`, fewest devices first, whether they fit or not."""
        choices = parallelisms(self.shape, self.hardware, devices_max=devices_max)
        for parallel in sorted(choices, key=lambda parallel: parallel.devices):
            try:
                yield self.price(parallel)
            except ConfigError:  # the model cannot be split this way
                if parallel == Parallel():
                    raise  # parallelism is not the cause


def parallel_name(parallel: Parallel) -> str:
    """Format a parallelism, such as TP 4 x PP 2."""
    degrees = {"TP": parallel.tp, "PP": parallel.pp, "DP": parallel.dp, "EP": parallel.ep}
    said = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return " x ".join(said) or "one device"


def _flag(path: tuple[int | str, ...]) -> str:
    return f"--{str(path[0]).replace('_', '-')}"


def _holds(model: Roofline, tokens: int) -> bool:
    try:
        return model.kv_capacity_tokens >= model.kv_held_tokens(tokens)
    except ConfigError:  # the weights alone do not fit
        return False


def _check_number(flag: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{flag}: must be >= 1 and <= {most:,}, got {value:,}")


_RUNNING_MAX = 1024


def graph_of(question: Question, layout: Layout) -> Graph:
    """Build the graph of a layout."""
    return build(graph_data(question, layout))


def graph_data(question: Question, layout: Layout) -> dict[str, Any]:
    """Build the graph of a layout as plain data."""
    router: dict[str, Any] = {"policy": "kv"}
    if layout.is_disaggregated:
        prefill, decode = layout.role_layouts
        rate = question.link_bytes_per_s(prefill.parallel, decode.parallel)
        router["disagg"] = {"link_bytes_per_s": rate}
    return {
        "name": "plan",
        "model": question.model,
        "block_size": BLOCK_SIZE,
        "router": router,
        "roles": {
            role_layout.role.value: _role(question, role_layout) for role_layout in layout.role_layouts
        },
        "slo": question.slo.model_dump(),
    }


def graph_text(question: Question, layout: Layout, note: str) -> str:
    """Format the graph as YAML, with the lines of `note` as comments above it."""
    said = "".join(f"# {line}\n" for line in note.splitlines())
    return said + yaml.safe_dump(graph_data(question, layout), sort_keys=False)


def _role(question: Question, role_layout: RoleLayout) -> dict[str, Any]:
    model, demand = question.price(role_layout.parallel), question.demand
    each = model.kv_held_tokens(demand.input_tokens + demand.output_tokens)
    room = int(model.kv_capacity_tokens / each) // role_layout.parallel.dp
    in_step = role_layout.max_batch_tokens // model.verified_tokens
    return question.role(
        role_layout.parallel,
        replicas=role_layout.workers,
        max_batch_tokens=role_layout.max_batch_tokens,
        max_running_requests=max(min(room, in_step, _RUNNING_MAX), 1),
    )
