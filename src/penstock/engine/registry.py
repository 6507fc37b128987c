"""Engines by the name that a graph or a flag gives, users' own included."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Event
from typing import Any

from penstock.core.config import nearest
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.types.instances import Role
from penstock.engine.kv_tiers import TierMaker, tier_maker
from penstock.engine.launch import EngineLaunch, LaunchHost, ThisHost
from penstock.engine.mock import MockRanks, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.spec import EngineSpec
from penstock.engine.weights_digest import weights_digest, weights_stamp
from penstock.seams import Engine

_FORM = "`package.module:make`, importable by every worker (PYTHONPATH)"
_UNTOLD = ("schedulers",)
_MEMBERS = ("start", "submit", "abort", "steps", "load", "close")


def check_user_engine_name(name: str) -> None:
    """Check a user engine's name without importing its code.

    Raises:
        ConfigError: it is not of the form `package.module:make`, or there is no such package.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"engine {name!r}: expected {_FORM}")
    package = module_name.split(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        raise ConfigError(f"engine {name!r}: there is no module {package!r}; expected {_FORM}")


def user_engine_launch(name: str, spec: EngineSpec, host: LaunchHost) -> EngineLaunch:  # noqa: ARG001
    """Describe a user's engine by the plain fields of its `EngineSpec`, without importing the engine's code."""
    plain = {field.name: getattr(spec, field.name) for field in fields(spec)}
    kinds = (str, int, dict, tuple)
    return EngineLaunch(
        call=f"{name}(EngineSpec)",
        arguments={
            key: value for key, value in plain.items() if isinstance(value, kinds) and key not in _UNTOLD
        },
    )


def make_user_engine(name: str, spec: EngineSpec) -> Engine:
    """Import a user's engine and make it: `make(spec)` returns a `penstock.seams.Engine`.

    Raises:
        ConfigError: its code cannot be imported, it raises something else than a PenstockError, or what it returns is no engine.
    """
    check_user_engine_name(name)
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"engine {name!r}: {module_name!r} cannot be imported: {type(error).__name__}: {error}; expected {_FORM}"
        ) from error
    make = getattr(module, attribute, None)
    if not callable(make):
        callables = [
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        raise ConfigError(
            f"engine {name!r}: {module_name} has no {attribute!r}{nearest(attribute, callables)}"
        )
    try:
        engine: Engine = make(spec)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"engine {name!r}: {attribute}(spec) raised {type(error).__name__}: {error}; expected a penstock.seams.Engine"
        ) from error
    lacking = [member for member in _MEMBERS if not callable(getattr(engine, member, None))]
    if lacking:
        raise ConfigError(
            f"engine {name!r}: {attribute}(spec) returned a {type(engine).__name__} without {', '.join(lacking)};"
            " expected a penstock.seams.Engine"
        )
    return engine


LINK_ENGINE = "region"
"""Engine of links to other regions, which no role has."""
MOCK_BLOCKS = 4096
"""KV blocks of a mock engine where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """The facts about an engine that hold before the engine is made.

    Attributes:
        make: makes an engine, or raises ConfigError.
        describe: describes the start of an engine that `make` makes; needs neither its packages nor a checkpoint.
        modules: what making it imports, for spare processes that import them ahead of time.
        dtypes: number formats that it computes in; None: any, or the engine refuses others itself.
        takes_args: whether `EngineSpec.args` reach it.
        is_parallel: whether one worker may use several devices.
        has_adapters: whether it serves LoRA adapters.
        has_kv_tiers: whether it keeps KV in tiers below its device.
        has_weights: whether it computes the model, on a device or core of its own.
        is_elsewhere: whether the model runs outside of the worker's machine, whose hardware then says nothing of its speed.
        follow: takes part in a worker of several nodes on a node that does not lead: starts the engine's processes of this node, calls
            its second argument once they take part, and blocks until they end; None: a worker is on one node.
        count_workers: how many workers the engine's arguments are for, None where they do not say; None: any number.
    """

    make: Callable[[EngineSpec], Engine]
    describe: Callable[[EngineSpec, LaunchHost], EngineLaunch]
    modules: tuple[str, ...] = ()
    dtypes: tuple[str, ...] | None = None
    takes_args: bool = True
    is_parallel: bool = True
    has_adapters: bool = False
    has_kv_tiers: bool = False
    has_weights: bool = True
    is_elsewhere: bool = False
    follow: Callable[[EngineSpec, Callable[[], None]], None] | None = None
    count_workers: Callable[[Mapping[str, Any]], int | None] | None = None


def create_engine(name: str, spec: EngineSpec) -> Engine:
    """Make an engine; `start` loads its model.

    Raises:
        ConfigError: there is no engine of this name, its packages are missing, or the spec contradicts it.
    """
    kind = engine_kind(name)
    _check_spec(name, kind, spec)
    return kind.make(spec)


def describe_launch(name: str, spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    """Describe how `create_engine` and the engine's `start` start an engine.

    Args:
        name: of the engine.
        spec: the engine; without a checkpoint it lacks what the engine reads from one.
        host: gives ports and directories, or names for them.

    Raises:
        ConfigError: there is no engine of this name, or the spec contradicts it.
    """
    kind = engine_kind(name)
    _check_spec(name, kind, spec)
    return kind.describe(spec, host)


def _check_spec(name: str, kind: EngineKind, spec: EngineSpec) -> None:
    """Check that the engine has what the spec asks for.

    Raises:
        ConfigError: it takes no arguments, or has no KV tiers.
    """
    if spec.args and not kind.takes_args:
        given = ", ".join(sorted(spec.args))
        raise ConfigError(f"engine_args: engine {name!r} takes none, got {given}; leave them out")
    if spec.kv.present() and not kind.has_kv_tiers:
        given = ", ".join(spec.kv.present())
        having = ", ".join(each for each, kind in _KINDS.items() if kind.has_kv_tiers)
        raise ConfigError(
            f"kv: engine {name!r} has no KV tiers below its device, got {given}; use engine {having}, or leave kv out"
        )


def engine_kind(name: str) -> EngineKind:
    """Give the facts about an engine; a user's engine itself refuses what it cannot do.

    Raises:
        ConfigError: there is no engine of this name that runs.
    """
    if ":" in name:
        return EngineKind(
            make=partial(make_user_engine, name),
            describe=partial(user_engine_launch, name),
            has_adapters=True,
        )
    kind = _LINK if name == LINK_ENGINE else _KINDS.get(name)
    if kind is None:
        raise ConfigError(f"engine: there is no {name!r}{nearest(name, list(_KINDS))}")
    return kind


def check_engine_name(name: str) -> None:
    """Check that a name may be an engine's, without importing its code.

    Args:
        name: one of `engine_names`, or `package.module:make` for a user's engine.

    Raises:
        ConfigError: no engine has this name.
    """
    if ":" in name:
        check_user_engine_name(name)
    elif name not in _KINDS:
        raise ConfigError(f"there is no engine {name!r}{nearest(name, list(_KINDS))}")


def engine_names() -> tuple[str, ...]:
    """List the engines that run; users' own besides."""
    return tuple(_KINDS)


def _mock_shape(spec: EngineSpec) -> RunnerInfo:
    if spec.context_length is None:
        raise ConfigError("context_length: the mock engine has no checkpoint to read it from; give it")
    return RunnerInfo(
        num_blocks=spec.kv_blocks or MOCK_BLOCKS,
        block_size=spec.block_size,
        context_length=spec.context_length,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        kv_bytes_per_block=spec.mock.kv_bytes_per_block,
    )


def _describe_mock(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:  # noqa: ARG001 - it takes nothing
    arguments = asdict(_mock_shape(spec)) | {"mock": spec.mock.model_dump(mode="json")}
    return _own_launch("penstock.engine.mock", arguments, spec)


def _own_launch(call: str, arguments: Mapping[str, Any], spec: EngineSpec) -> EngineLaunch:
    """Describe an engine of Penstock's: its arguments, its scheduler, and its KV tiers."""
    scheduler = {"scheduler": spec.scheduler.model_dump(mode="json")}
    tiers = {"kv": spec.kv.model_dump(mode="json")} if spec.kv.present() else {}
    said = {name: value for name, value in arguments.items() if value is not None}
    return EngineLaunch(call=call, arguments=said | scheduler | tiers)


def _mock(spec: EngineSpec) -> Engine:
    shape = _mock_shape(spec)
    if spec.data_parallel > 1:
        return _mock_ranks(spec, shape)
    make_tiers = _tiers(spec, lambda: "mock", lambda: "mock")
    engine = mock_engine(shape, spec.mock, spec.scheduler, hash_key=spec.hash_key, make_tiers=make_tiers)
    engine.by_role = spec.schedulers
    return engine


def _mock_follows(spec: EngineSpec, ready: Callable[[], None]) -> None:  # noqa: ARG001 - it computes nothing
    ready()
    Event().wait()


def _mock_ranks(spec: EngineSpec, shape: RunnerInfo) -> Engine:
    """Make a mock engine of several data-parallel ranks, which share its blocks and its batch limits."""
    if spec.role is not Role.AGGREGATED or spec.kv.present():
        raise ConfigError(
            f"data_parallel: the ranks of engine mock transfer no KV and have no tiers, so it must be 1 with role {spec.role}"
            f" or with kv, got {spec.data_parallel}; use replicas"
        )
    shape = replace(shape, num_blocks=shape.num_blocks // spec.data_parallel)
    scheduler = spec.scheduler.of_rank(spec.data_parallel)
    return MockRanks(
        [mock_engine(shape, spec.mock, scheduler, hash_key=spec.hash_key) for _ in range(spec.data_parallel)]
    )


def _paged_settings(spec: EngineSpec) -> dict[str, Any]:
    return {
        "model": spec.model,
        "device": spec.device,
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "kv_blocks": spec.kv_blocks,
        "sharing_engines": spec.sharing_engines,
        "context_length": spec.context_length,
        "eos_token_ids": spec.eos_token_ids or None,
    }


def _describe_paged(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:  # noqa: ARG001 - it takes nothing
    return _own_launch("penstock.engine.paged.PagedConfig", _paged_settings(spec), spec)


def _paged(spec: EngineSpec) -> Engine:
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"engine paged: {' and '.join(missing)} not installed; run `pip install penstock-llm[engine]`, or use engine mock"
        )
    from penstock.engine.paged.memory import PagedConfig  # noqa: PLC0415 - its packages are an extra
    from penstock.engine.paged.runner import paged_engine  # noqa: PLC0415

    config = PagedConfig.parse(_paged_settings(spec), source="engine paged")
    make_tiers = _tiers(spec, lambda: weights_digest(spec.model), lambda: weights_stamp(spec.model))
    engine = paged_engine(config, spec.scheduler, hash_key=spec.hash_key, make_tiers=make_tiers)
    engine.by_role = spec.schedulers
    return engine


def _tiers(spec: EngineSpec, digest: Callable[[], str], stamp: Callable[[], str]) -> TierMaker | None:
    return tier_maker(
        spec.kv,
        worker=f"{spec.role}.{spec.index}",
        model_digest=digest,
        hash_key=spec.hash_key,
        model_stamp=stamp,
        host_part=spec.host_part,
    )


def _openai(spec: EngineSpec) -> Engine:
    from penstock.engine.openai.make import make_engine  # noqa: PLC0415 - aiohttp takes 0.1 s to import

    return make_engine(spec)


def _link(spec: EngineSpec) -> Engine:
    from penstock.engine.openai.region import make_link  # noqa: PLC0415 - as above

    return make_link(spec)


def _describe_link(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:  # noqa: ARG001 - it takes nothing
    return EngineLaunch(call="another region", arguments=dict(spec.args))


def _describe_openai(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:  # noqa: ARG001 - it takes nothing
    from penstock.engine.openai.config import ServerConfig  # noqa: PLC0415

    config = ServerConfig.parse(dict(spec.args), source="engine openai").of_server(spec.index)
    return EngineLaunch(call="a running server", arguments=config.model_dump(mode="json", exclude_unset=True))


def _count_urls(args: Mapping[str, Any]) -> int | None:
    """Count the servers of engine `openai`: one worker for each."""
    urls = args.get("url")
    if isinstance(urls, str):
        return 1
    return len(urls) if isinstance(urls, list | tuple) else None


def _vllm(spec: EngineSpec) -> Engine:
    from penstock.engine.vllm.arguments import check_version, transfers_kv  # noqa: PLC0415 - only where it is used
    from penstock.engine.vllm.engine import (  # noqa: PLC0415 - only where it is used
        NixlVllmEngine,
        VllmEngine,
    )

    check_version()
    return NixlVllmEngine(spec) if transfers_kv(spec) else VllmEngine(spec)


def _describe_vllm(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    from penstock.engine.vllm.launch import engine_launch  # noqa: PLC0415 - only where it is used

    return engine_launch(spec, host)


def _vllm_follows(spec: EngineSpec, ready: Callable[[], None]) -> None:
    from penstock.engine.vllm.arguments import check_version  # noqa: PLC0415 - only where it is used
    from penstock.engine.vllm.launch import (  # noqa: PLC0415 - only where it is used
        engine_launch,
        follow,
    )

    check_version()
    follow(spec, engine_launch(spec, ThisHost()), ready)


def _sglang(spec: EngineSpec) -> Engine:
    from penstock.engine.openai.make import make_sglang  # noqa: PLC0415 - aiohttp takes 0.1 s to import

    return make_sglang(spec)


def _sglang_follows(spec: EngineSpec, ready: Callable[[], None]) -> None:
    from penstock.engine.openai.sglang_server import sglang_follows  # noqa: PLC0415 - as above

    sglang_follows(spec, ready)


def _describe_sglang(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    from penstock.engine.openai.sglang_server import sglang_launch  # noqa: PLC0415 - as above

    return sglang_launch(spec, host)


def _trtllm(spec: EngineSpec) -> Engine:
    from penstock.engine.openai.make import make_trtllm  # noqa: PLC0415 - as above

    return make_trtllm(spec)


def _describe_trtllm(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    from penstock.engine.openai.trtllm_server import trtllm_launch  # noqa: PLC0415 - as above

    return trtllm_launch(spec, host)


_KINDS = {
    "mock": EngineKind(
        make=_mock,
        describe=_describe_mock,
        takes_args=False,
        has_adapters=True,
        has_kv_tiers=True,
        has_weights=False,
        follow=_mock_follows,
    ),
    "paged": EngineKind(
        make=_paged,
        describe=_describe_paged,
        modules=("penstock.engine.paged.runner",),
        dtypes=("auto", "float32", "bfloat16", "float16"),
        takes_args=False,
        is_parallel=False,
        has_kv_tiers=True,
    ),
    "openai": EngineKind(
        make=_openai,
        describe=_describe_openai,
        modules=("penstock.engine.openai.make",),
        has_adapters=True,
        has_weights=False,
        is_elsewhere=True,
        count_workers=_count_urls,
    ),
    "vllm": EngineKind(
        make=_vllm, describe=_describe_vllm, has_adapters=True, has_kv_tiers=True, follow=_vllm_follows
    ),
    "sglang": EngineKind(make=_sglang, describe=_describe_sglang, has_adapters=True, follow=_sglang_follows),
    "trtllm": EngineKind(make=_trtllm, describe=_describe_trtllm),
}
_LINK = EngineKind(
    make=_link,
    describe=_describe_link,
    modules=("penstock.engine.openai.region",),
    has_weights=False,
    is_elsewhere=True,
)
