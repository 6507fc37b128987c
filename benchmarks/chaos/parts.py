"""Runs under faults with different seeds, counted as one: a long run in parts that each leave the machine to others."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError

_COUNTS = ("completed", "excused", "lost", "wrong", "repeated", "faults", "s")
_OWN = ("requests", "seed", "faults")
"""Fields of the configuration in which parts differ."""


def add_up(files: Sequence[Path], figures: dict[str, float], samples: dict[str, list[float]]) -> BenchReport:
    """Add up the reports of parts.

    Args:
        files: reports of parts, each with its own seed.
        figures: of CPU time, from this run.
        samples: likewise.

    Raises:
        ConfigError: a file is no report of a part, or the parts differ in more than their seeds.
    """
    parts = [_read(path) for path in files]
    first = parts[0]
    for path, part in zip(files, parts, strict=True):
        for field in ("commit", "machine"):
            if part[field] != first[field]:
                raise ConfigError(
                    f"--add: {path}: {field} differs from that of {files[0]}; run all parts alike"
                )
        if _common(part) != _common(first):
            raise ConfigError(f"--add: {path}: config differs from that of {files[0]}; run all parts alike")
    seeds = [part["config"]["seed"] for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--add: two parts have one seed of {seeds}; a part counts once")
    of = {name: [part["figures"][f"chaos_{name}"] for part in parts] for name in _COUNTS}
    faults: Counter[str] = Counter()
    for part in parts:
        faults.update(part["config"]["faults"])
    total = {f"chaos_{name}": sum(values) for name, values in of.items()}
    latencies_s = {
        "chaos_latency_p50_s": median(part["figures"]["chaos_latency_p50_s"] for part in parts),
        "chaos_latency_max_s": max(part["figures"]["chaos_latency_max_s"] for part in parts),
    }
    return BenchReport(
        name="chaos",
        config=_common(first)
        | {
            "requests": sum(part["config"]["requests"] for part in parts),
            "seeds": seeds,
            "faults": dict(faults),
            "commit_of_parts": first["commit"],
        },
        figures=total
        | {"chaos_requests_per_s": total["chaos_completed"] / total["chaos_s"]}
        | latencies_s
        | figures,
        samples={f"parts_{name}": values for name, values in of.items()} | samples,
        problems=[] if total["chaos_completed"] else ["no request was completed"],
    )


def _common(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part["config"].items() if name not in _OWN}


def _read(path: Path) -> dict[str, Any]:
    try:
        part: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--add: {path}: expected a report of this bench: {error}") from error
    if part.get("name") != "chaos" or "chaos_completed" not in part.get("figures", {}):
        raise ConfigError(f"--add: {path}: expected a report of this bench with requests under faults")
    return part
