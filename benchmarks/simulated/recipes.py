"""The recipes in examples/recipes under one load, each by the command `penstock simulate` that docs/recipes.md gives."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from penstock.bench.report import BenchReport
from penstock.core.errors import Unavailable

ROOT = Path(__file__).parents[2]
WORKLOAD = "examples/workloads/long-prompts.yaml"
RECIPES: dict[str, tuple[str, ...]] = {
    "llama-3.3-70b-fp8-h100-vllm": (
        "model=llama-3.1-70b", "roles.prefill.weight_dtype=fp8", "roles.decode.weight_dtype=fp8",
    ),
    "gpt-oss-120b-h100-p4d4-vllm": ("model=gpt-oss-120b",),
    "deepseek-r1-gb200-sglang": (
        "model=deepseek-r1", "roles.prefill.weight_dtype=fp8", "roles.decode.weight_dtype=fp8",
    ),
    "deepseek-r1-gb200-trtllm": (
        "model=deepseek-r1", "roles.prefill.weight_dtype=fp8", "roles.prefill.expert_dtype=nvfp4",
        "roles.decode.weight_dtype=fp8", "roles.decode.expert_dtype=nvfp4",
    ),
}  # fmt: skip
"""Recipe: fields to set, since a simulation has no checkpoint that says them."""
_QUICK = ("gpt-oss-120b-h100-p4d4-vllm",)
_TIMEOUT_S = 300.0


def arguments(recipe: str) -> list[str]:
    """Give the arguments of `penstock simulate`."""
    sets = [part for field in RECIPES[recipe] for part in ("--set", field)]
    return [WORKLOAD, "--graph", f"examples/recipes/{recipe}.yaml", *sets]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the load is fixed."""


def run(options: argparse.Namespace) -> BenchReport:
    """Simulate each recipe; the same seed gives the same figures on any machine.

    Raises:
        Unavailable: a simulation failed.
    """
    recipes = _QUICK if options.quick else tuple(RECIPES)
    figures: dict[str, float] = {}
    problems = []
    for recipe in recipes:
        found = _simulate(recipe)
        figures |= {
            f"{recipe}_ttft_ms_p50": 1e3 * found["ttft_s"]["p50"],
            f"{recipe}_ttft_ms_p99": 1e3 * found["ttft_s"]["p99"],
            f"{recipe}_tpot_ms_p50": 1e3 * found["itl_s"]["p50"],
            f"{recipe}_goodput_requests_per_s": found["goodput_rps"],
            f"{recipe}_requests": found["requests"],
        }
        if found["completed"] != found["requests"]:
            problems.append(f"{recipe}: {found['completed']} of {found['requests']} requests were completed")
    return BenchReport(
        name="recipes",
        config={
            "commands": {recipe: " ".join(["penstock simulate", *arguments(recipe)]) for recipe in recipes},
            "quick": options.quick,
        },
        figures=figures,
        problems=problems,
    )


def _simulate(recipe: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        out = Path(directory, "report.json")
        command = [sys.executable, "-m", "penstock", "simulate", *arguments(recipe), "--json", str(out)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=ROOT
        )
        if done.returncode:
            raise Unavailable(
                f"the simulation of {recipe} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
            )
        return msgspec.json.decode(out.read_bytes(), type=dict[str, Any])
