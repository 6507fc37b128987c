"""How fast the paged engine generates, beside a plain `generate` loop on the same model, cores and prompts.

The model is random, of 5 million parameters: small enough that what is measured is the engine. Runs alternate, so
that a machine that is busy for a while is so for all of them; figures are medians over the rounds. Afterwards the
same model is served and asked over HTTP.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import statistics
import tempfile
from pathlib import Path

from benchmarks.processes.served import put_load, served
from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError
from penstock.core.native import native

SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
_SPEEDUP_WANTED = 5.0
_IDLE_RATIO_MAX = 1.2
_HTTP_CONCURRENCY = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input-tokens",
        type=int,
        default=128,
        metavar="I",
        help="of a prompt, half more or less (default 128)",
    )
    parser.add_argument(
        "--output-tokens", type=int, default=64, metavar="O", help="of an answer (default 64)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of all runs (default 3)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of both (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default 0)")
    parser.add_argument("--no-http", action="store_true", help="leave the run over HTTP out")


def run(options: argparse.Namespace) -> BenchReport:
    """Measure all in turns.

    Raises:
        ConfigError: the engine's packages are not installed, or an option makes no sense.
    """
    missing = [package for package in ("torch", "transformers") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed; run `pip install penstock-llm[engine]`")
    expect_at_least(options, input_tokens=1, output_tokens=1, rounds=1, threads=1)
    from benchmarks.processes.generation import measure  # noqa: PLC0415 - its packages are an extra
    from tests.support.checkpoints import make_checkpoint  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        model_dir = make_checkpoint(Path(directory) / "llama-5m", "llama", seed=options.seed, **SIZES)
        samples, limits = asyncio.run(measure(model_dir, options))
        problems: list[str] = []
        if not options.no_http:
            report = _over_http(model_dir, options)
            samples["paged_http_tokens_per_s_c32"] = [report.figures["output_tokens_per_s"]]
            problems += report.problems
    figures = {name: statistics.median(values) for name, values in samples.items()}
    speedup = figures["engine_tokens_per_s_c32"] / figures["generate_tokens_per_s"]
    ratio = figures["decode_step_ms_idle_blocks"] / figures["decode_step_ms_free_blocks"]
    figures |= {"engine_speedup_c32": speedup, "decode_step_idle_blocks_ratio": ratio}
    if speedup < _SPEEDUP_WANTED:
        problems.append(f"{speedup:.1f} times a plain generate loop, expected {_SPEEDUP_WANTED:g}")
    if ratio > _IDLE_RATIO_MAX:
        problems.append(f"decode steps take {ratio:.2f} times as long with idle blocks, expected the same")
    return BenchReport(
        name="engine",
        config={
            "model": SIZES | {"architecture": "llama", "dtype": "float32"},
            "input_tokens": options.input_tokens,
            "output_tokens": options.output_tokens,
            "rounds": options.rounds,
            "threads": options.threads,
            "seed": options.seed,
            "quick": options.quick,
            "versions": {
                package: importlib.metadata.version(package) for package in ("torch", "transformers")
            },
            "implementation": native.implementation if native else "python",
        },
        samples=samples,
        limits=limits,
        figures=figures,
        problems=[] if options.quick else problems,
    )


def _over_http(model_dir: Path, options: argparse.Namespace) -> BenchReport:
    """Ask one worker and one frontend for the same load at concurrency 32."""
    requests = _HTTP_CONCURRENCY * (1 if options.quick else 8)
    with served(str(model_dir), "--engine", "paged") as deployment:
        load = {
            "endpoint": "completions",
            "requests": requests,
            "concurrency": _HTTP_CONCURRENCY,
            "input-tokens": options.input_tokens,
            "output-tokens": options.output_tokens,
        }
        return put_load(deployment, load)
