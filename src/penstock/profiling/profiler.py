"""Makes a profile: opens the target, runs the sweep, fits and evaluates."""

import importlib.metadata
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from penstock import __version__
from penstock.bench.report import machine
from penstock.core.clock import wall_time_s
from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.card import open_checkpoint, served_name
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.deploy.supervisor.local_part import runnable_roles
from penstock.engine.registry import check_user_engine_name, create_engine, engine_names
from penstock.graph import DEMO_MODEL, Overrides, build
from penstock.perf.hardware import find_hardware
from penstock.perf.latency import LatencyModel
from penstock.perf.profile import (
    CellFit,
    DecodePoint,
    Evaluation,
    HeldOut,
    Latency,
    Point,
    PrefillPoint,
    Profile,
    ProfiledModel,
)
from penstock.profiling.endpoint import TARGET, EndpointTarget, connect
from penstock.profiling.engine_target import EngineTarget
from penstock.profiling.sweep import CELLS_MIN, Measured, SweepConfig, measure, outliers, plan_sweep
from penstock.profiling.target import Cell, Description, ProfileTarget


def judge(profile: Profile, measured: Measured, left_out: tuple[str, ...]) -> Evaluation:
    """Evaluate `ProfiledModel(profile)`.

    Args:
        profile: profile of the measured points.
        measured: points of the sweep.
        left_out: cells not measured, with the reason.
    """
    model = ProfiledModel(profile)
    cells = [
        CellFit(
            cell=point.name,
            measured_s=point.seconds,
            fitted_s=model.point_s(point),
            left_out_s=_without(profile, point),
            samples=len(point.samples_s),
            outliers=outliers(point),
        )
        for point in profile.points
    ]
    held_out = [
        HeldOut(
            cell=point.name,
            latency=Latency.ITL if isinstance(point, DecodePoint) else Latency.TTFT,
            measured_s=point.seconds,
            predicted_s=predict_s(model, point, profile.step_tokens),
            samples=len(point.samples_s),
            outliers=outliers(point),
        )
        for point in measured.held_out
    ]
    return Evaluation.of(cells, held_out, (*left_out, *measured.left_out))


def predict_s(model: ProfiledModel, point: Point, step_tokens: int | None) -> float:
    """Predict a request's latency at a point: TTFT of a prompt, or ITL in a batch."""
    if isinstance(point, DecodePoint):
        return model.point_s(point)
    return ttft_s(model, point.new_tokens, point.cached_tokens, step_tokens)


def ttft_s(model: LatencyModel, new_tokens: int, cached_tokens: int, step_tokens: int | None) -> float:
    """Sum the step times of one prompt on an idle engine, each step with at most `step_tokens`."""
    if step_tokens is None:
        return model.prefill_s(new_tokens, cached_tokens)
    total_s, end = 0.0, cached_tokens + new_tokens
    for start in range(cached_tokens, end, step_tokens):
        total_s += model.prefill_s(min(step_tokens, end - start), start)
    return total_s


def _without(profile: Profile, point: Point) -> float | None:
    """Predict a point from a fit to the others; None if too few remain."""
    prefill = tuple(other for other in profile.prefill if other is not point)
    decode = tuple(other for other in profile.decode if other is not point)
    alone = sum(isinstance(other, PrefillPoint) and other.prompts == 1 for other in prefill)
    if min(alone, len(decode)) < CELLS_MIN:
        return None
    return ProfiledModel(replace(profile, prefill=prefill, decode=decode)).point_s(point)


OnProgress = Callable[[int, int, Cell], None]
"""Called with (measurements done, total, next cell)."""
_LIBRARIES = {"paged": ("torch", "transformers")}


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The target of a profile.

    target:   an engine's name, or a URL
    model:    for an engine a checkpoint's directory, a hub name or `demo` (None); for a URL the listed name
    hardware: name in the hardware catalogue; None is the CPU for an engine, unknown for a URL
    settings: settings of an engine, as `path=value` of a graph
    """

    target: str
    model: str | None = None
    hardware: str | None = None
    settings: tuple[str, ...] = ()
    api_key: str | None = None

    @property
    def is_url(self) -> bool:
        return "://" in self.target


async def make_profile(
    wanted: ProfileRequest, config: SweepConfig, on_progress: OnProgress | None = None
) -> Profile:
    """Measure the target and fit a profile.

    Raises:
        ConfigError: unknown engine, endpoint or model, or too few cells can be measured.
        EngineError, Unavailable: the engine or the endpoint failed.
    """
    measured_at = datetime.fromtimestamp(wall_time_s(), UTC).isoformat(timespec="seconds")
    opened: AbstractAsyncContextManager[ProfileTarget]
    if wanted.is_url:
        opened = await _open_endpoint(wanted, config, run=f"{config.seed}/{measured_at}")
    else:
        opened = _open_engine(wanted, config.seed)
    async with opened as target:
        profile = await sweep(target, config, on_progress)
    return replace(profile, measured_at=measured_at)


async def sweep(target: ProfileTarget, config: SweepConfig, on_progress: OnProgress | None = None) -> Profile:
    """Measure a ready target and evaluate the fit."""
    plan = plan_sweep(config, target.limits)
    total = (len(plan.fitted) + len(plan.held_out)) * (config.repeats + 1)
    report = None if on_progress is None else lambda done, cell: on_progress(done, total, cell)
    measured = await measure(target, plan, config, report)
    said = target.description
    profile = Profile(
        engine=said.engine,
        prefill=tuple(measured.prefill),
        decode=tuple(measured.decode),
        kv_bytes_per_token=said.kv_bytes_per_token,
        kv_capacity_tokens=said.kv_capacity_tokens,
        machine=said.machine,
        model=said.model,
        hardware=said.hardware,
        engine_version=said.engine_version,
        seed=config.seed,
        step_tokens=target.limits.step_tokens,
    )
    return replace(profile, evaluation=judge(profile, measured, plan.left_out))


async def _open_endpoint(wanted: ProfileRequest, config: SweepConfig, *, run: str) -> EndpointTarget:
    if wanted.settings:
        raise ConfigError("--set: only with an engine; a server at a URL has its own settings")
    hardware = find_hardware(wanted.hardware).name if wanted.hardware else ""
    endpoint = await connect(
        wanted.target, wanted.model, wanted.api_key, request_timeout_s=config.request_timeout_s
    )
    return EndpointTarget(endpoint, hardware=hardware, run=run)


def _open_engine(wanted: ProfileRequest, seed: int) -> EngineTarget:
    names = list(engine_names())
    if wanted.target.partition(":")[2].isidentifier():
        check_user_engine_name(wanted.target)
    elif wanted.target not in names:
        raise ConfigError(
            f"{TARGET}: {wanted.target!r} is neither a URL such as http://127.0.0.1:8000 nor an engine"
            f"{nearest(wanted.target, names)}"
        )
    if wanted.api_key:
        raise ConfigError("--api-key: only with a URL")
    overrides = Overrides(wanted.settings)
    if wanted.hardware is not None:
        overrides.assign("roles.aggregated.hardware", wanted.hardware, flag="--hardware")
    data: dict[str, Any] = {
        "model": wanted.model or DEMO_MODEL,
        "roles": {"aggregated": {"engine": wanted.target}},
    }
    graph = build(data, overrides, source="profile")
    role = runnable_roles(graph)[Role.AGGREGATED]
    spec = engine_spec(graph, role, open_checkpoint(graph))
    host = machine()
    description = Description(
        engine=role.engine,
        model=served_name(graph),
        engine_version=", ".join([f"penstock {__version__}", *_versions(role.engine)]),
        hardware=role.hardware,
        machine=f"{host['cpu']}, {host['cores']} cores",
    )
    return EngineTarget(
        create_engine(role.engine, spec),
        description,
        vocab_size=spec.vocab_size,
        seed=random.Random(seed).getrandbits(32),
    )


def _versions(engine: str) -> list[str]:
    return [f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES.get(engine, ())]
