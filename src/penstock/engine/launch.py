"""How an engine is started: the same description starts it in a worker, and is printed by `penstock graph render`."""

import contextlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from penstock.core.errors import ConfigError
from penstock.engine.kv_events.subscriber import PublisherAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """What a worker calls to start its engine, with which arguments, in which environment.

    Attributes:
        call: the class, function or program that takes the arguments, as `vllm.AsyncEngineArgs`.
        version: the engine and version whose names these are; "" for Penstock's own.
        arguments: plain values by the engine's names; what is not here keeps the engine's default.
        environment: variables that are set for the engine's processes.
        kv_events: where the engine is told to publish its KV events; None: it publishes none.
    """

    call: str
    version: str = ""
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_events: PublisherAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePackage:
    """An engine's Python package.

    Attributes:
        engine: the engine's name in a graph.
        module: what is imported.
        install: command that installs it.
        versions: (lowest, first that is not supported), as (major, minor, patch); None: any.
        distributions: names under which an installer knows the package, any of them.
    """

    engine: str
    module: str
    install: str
    versions: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    distributions: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The supported versions as a requirement, such as `>=2.13,<2.15`; empty for any."""
        if self.versions is None:
            return ""
        low, above = (".".join(map(str, each)) for each in self.versions)
        return f">={low},<{above}"

    @property
    def is_installed(self) -> bool:
        try:
            return find_spec(self.module) is not None
        except (ImportError, ValueError):
            return False

    def find_version(self) -> str:
        """Find the installed version without importing the package; "" if it is not installed, or says none."""
        if not self.is_installed:
            return ""
        for name in self.distributions or (self.module,):
            with contextlib.suppress(PackageNotFoundError):
                return version(name)
        return str(getattr(sys.modules.get(self.module), "__version__", ""))

    def supports(self, found: str) -> bool:
        """Say whether a version is in the supported range."""
        return self.versions is None or self.versions[0] <= numbers(found) < self.versions[1]

    def need(self) -> None:
        """Raise ConfigError where the package is not installed."""
        if not self.is_installed:
            raise ConfigError(
                f"engine {self.engine}: package {self.module} is not installed; run `{self.install}` in the environment of"
                " Penstock's workers"
            )


def numbers(text: str) -> tuple[int, ...]:
    """Read the leading numbers of a version: `0.5.23.post1` is (0, 5, 23), `1.2.0rc3` is (1, 2, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")[:3]) if match else ()


def expect_gpu(engine: str, device: str) -> None:
    """Raise ConfigError where the graph gives the worker a CPU."""
    if not device.startswith("cuda"):
        raise ConfigError(
            f"engine {engine}: runs on NVIDIA GPUs alone, the graph gives this worker hardware cpu; set hardware, as in"
            " `--set roles.aggregated.hardware=h100`"
        )


def refuse_own(engine: str, args: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Raise ConfigError where the graph's `engine_args` set an argument of Penstock's.

    Args:
        engine: the engine's name in a graph.
        args: the graph's `engine_args`.
        own: what to do instead, by the names of the arguments that Penstock sets.
    """
    for name in args:
        if name in own:
            raise ConfigError(f"engine_args.{name}: Penstock sets it for engine {engine}; {own[name]}")
