"""The report of a bench: JSON of a common schema, to compare runs across commits and machines."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import penstock
from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError

SCHEMA = 1
"""Increased when readers of old reports would misread a field."""
_GIT_TIMEOUT_S = 5


@dataclass(slots=True)
class BenchReport:
    """One run of one bench.

    `figures` are the results, with the unit in the name. `samples` are their raw measurements. `limits` are upper bounds of
    the machine, measured in the same run. `problems` are reasons why the run is invalid; they are not part of the JSON.
    """

    name: str
    config: Mapping[str, Any]
    figures: Mapping[str, float]
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    problems: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "schema": SCHEMA,
            "commit": commit(),
            "date": datetime.fromtimestamp(wall_time_s(), UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "config": dict(self.config),
            "samples": {name: list(values) for name, values in self.samples.items()},
            "limits": dict(self.limits),
            "figures": dict(self.figures),
        }

    def write(self, path: Path) -> None:
        """Write the JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.write_text(_dump(self.to_json()))
        except OSError as error:
            raise ConfigError(f"--json: {path}: cannot be written: {error.strerror}") from error

    def summary(self) -> str:
        """Format figures and limits as aligned lines."""
        rows = [*self.figures.items(), *((f"{name} (limit)", value) for name, value in self.limits.items())]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {_readable(value)}" for name, value in rows)


def _dump(report: dict[str, Any]) -> str:
    """Encode with one line per field and per list of samples."""
    samples = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in report["samples"].items()
    )
    lines = json.dumps(report | {"samples": {}}, indent=1)
    return lines.replace('"samples": {}', f'"samples": {{\n{samples}\n }}', 1) + "\n"


def _readable(value: float) -> str:
    if float(value).is_integer() or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def machine() -> dict[str, Any]:
    """Describe hardware and software, without the host name."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """Give the checkout's commit, with `+changes` if tracked files differ; without a checkout, the version."""
    package = Path(penstock.__file__).resolve().parent
    try:
        top = Path(_git(package, "rev-parse", "--show-toplevel"))
        if top / "src" / "penstock" != package:  # installed inside another project's checkout
            return f"v{penstock.__version__}"
        changes = _git(package, "status", "--porcelain", "--untracked-files=no")
        return _git(package, "rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return f"v{penstock.__version__}"


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(  # noqa: S603 - fixed arguments
        ["git", "-C", str(directory), *arguments],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
        timeout=_GIT_TIMEOUT_S,
    )
    return done.stdout.strip()
