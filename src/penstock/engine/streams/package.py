"""Checks before an engine's package is used: installed, of a supported version, a GPU, known argument names.

Each refusal is one line with the cause and the fix.
"""

import contextlib
import importlib
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from penstock.core.config import closest
from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An engine's Python package.

    Attributes:
        engine: the engine's name in a graph.
        module: what is imported.
        versions: (lowest, first that is not supported), as (major, minor, patch).
        install: command that installs it.
        distributions: names under which an installer knows the package, any of them.
    """

    engine: str
    module: str
    versions: tuple[tuple[int, ...], tuple[int, ...]]
    install: str
    distributions: tuple[str, ...] = ()

    @property
    def range(self) -> str:
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

    def load(self) -> ModuleType:
        """Import the package.

        Raises:
            ConfigError: it is not installed, of another version, or its import fails.
        """
        if not self.is_installed:
            raise ConfigError(
                f"engine {self.engine}: package {self.module} is not installed; run `{self.install}` in the environment of"
                " Penstock's workers"
            )
        try:
            module = importlib.import_module(self.module)
        except Exception as error:
            raise ConfigError(
                f"engine {self.engine}: `import {self.module}` fails with {first_line(error)}; reinstall with"
                f" `{self.install}`"
            ) from error
        self.check(str(getattr(module, "__version__", "")))
        return module

    def check(self, found: str) -> None:
        """Compare a version with the supported range.

        Raises:
            ConfigError: it is outside.
        """
        low, above = self.versions
        if not low <= numbers(found) < above:
            raise ConfigError(
                f"engine {self.engine}: {self.module} {found or 'of unknown version'} is installed, this adapter supports"
                f" {self.range}; run `{self.install}`"
            )


def numbers(text: str) -> tuple[int, ...]:
    """Read the leading numbers: `0.5.23.post1` is (0, 5, 23), `1.2.0rc3` is (1, 2, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")[:3]) if match else ()


def expect_gpu(engine: str, device: str) -> None:
    """Check that the graph gives the worker a GPU.

    Raises:
        ConfigError: it gives a CPU.
    """
    if not device.startswith("cuda"):
        raise ConfigError(
            f"engine {engine}: runs on NVIDIA GPUs alone, the graph gives this worker hardware cpu; set hardware, as in"
            " `--set roles.aggregated.hardware=h100`"
        )


def check_gpu(engine: str, device: str) -> None:
    """Check that there is a CUDA device.

    Raises:
        ConfigError: the worker has no GPU in the graph, or PyTorch sees none.
    """
    expect_gpu(engine, device)
    import torch  # noqa: PLC0415 - the engine's package brings it

    if not torch.cuda.is_available():
        raise ConfigError(
            f"engine {engine}: PyTorch sees no CUDA device; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use engine mock"
        )


def check_arguments(
    engine: str, args: Mapping[str, Any], known: Collection[str], ours: Mapping[str, str], where: str
) -> None:
    """Check the names of engine arguments.

    Args:
        engine: the engine's name in a graph.
        args: the graph's `engine_args`.
        known: names that the installed engine has; empty if they cannot be read.
        ours: names that Penstock sets, and the field of the graph that does.
        where: what documents the names.

    Raises:
        ConfigError: a name is unknown, or Penstock's.
    """
    for name in args:
        if name in ours:
            raise ConfigError(f"engine_args.{name}: Penstock sets it for engine {engine}; {ours[name]}")
        if known and name not in known:
            near = closest(name, list(known))
            hint = f"did you mean {near!r}?" if near else f"the names are those of {where}"
            raise ConfigError(f"engine_args.{name}: engine {engine} has no such argument; {hint}")


def supported(kwargs: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Keep the keyword arguments that the installed version has, and that say something."""
    names = set(names)
    return {name: value for name, value in kwargs.items() if name in names and value is not None}


def first_line(error: BaseException) -> str:
    """Shorten an engine's error to one line of at most 300 characters, with its type.

    pydantic's errors say in their second and third lines which field is wrong, and why.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 3 if lines and re.match(r"\d+ validation error", lines[0]) else 1
    return ": ".join([type(error).__name__, *lines[:count]])[:300]
