"""Streams' latencies beside long prompts: a prefill and a decode worker against two aggregated workers, as real processes."""

import argparse
import importlib.util
import tempfile
from pathlib import Path

from benchmarks.disagg import figures, plot
from benchmarks.disagg.choice import best_chunk
from benchmarks.disagg.memcpy import memcpy_bytes_per_s
from benchmarks.disagg.model import KV_BYTES_PER_TOKEN, SIZES, make_model
from benchmarks.disagg.sides import (
    CHUNKS,
    PROMPT_TOKENS_MAX,
    PROMPT_TOKENS_MIN,
    WHOLE,
    aggregated_flags,
    disaggregated_flags,
)
from benchmarks.disagg.stage import Stage
from benchmarks.disagg.table import Row, print_table
from benchmarks.disagg.workload import ARRIVALS, StreamsAndPrompts
from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError

_SECONDS, _QUICK_SECONDS = 30.0, 3.0
_TURNS, _QUICK_TURNS = 3, 1
_STREAMS, _QUICK_STREAMS = 12, 4
_QUIET_PROMPTS, _QUICK_QUIET_PROMPTS = 6, 1
_QUICK_CHUNKS = (WHOLE,)
_PREFILL_SHARE = 0.55
_PROMPT_TOKENS = (2100, 2600)
_DISAGGREGATED, _ALONE = 0, -1
"""Used where aggregated sides have a chunk size; `_ALONE` runs streams without prompts."""
_RATIO_WANTED = 3.0
_KV_TRANSFER_TURNS = 5
_CHECKSUMS = {"summed": (), "unsummed": ("--set", "worker.kv_transfer.checksum=false")}
"""Flags of the two sides of `--kv-transfer`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        metavar="S",
        help=f"to measure each side for in a turn (default {_SECONDS:g})",
    )
    add("--turns", type=int, metavar="N", help=f"of all sides, each with other prompts (default {_TURNS})")
    add("--streams", type=int, metavar="N", help=f"that decode all the time (default {_STREAMS})")
    add(
        "--prefill-share",
        type=float,
        default=_PREFILL_SHARE,
        metavar="P",
        help="of its time that the prefill worker is to compute prompts; it sets how often they come (default %(default)s)",
    )
    add(
        "--prompt-tokens",
        type=int,
        nargs=2,
        default=_PROMPT_TOKENS,
        metavar=("MIN", "MAX"),
        help=f"of the long prompts (default {_PROMPT_TOKENS[0]} {_PROMPT_TOKENS[1]})",
    )
    add("--arrivals", choices=ARRIVALS, default=ARRIVALS[0], help="of the long prompts (default %(default)s)")
    add("--seed", type=int, default=0, help="of weights, prompts and moments (default 0)")
    add(
        "--kv-transfer",
        type=int,
        metavar="N",
        help="measure only KV transfers, with and without checksums: N prompts one after the other, without other load,"
        f" in each of --turns (here {_KV_TRANSFER_TURNS})",
    )
    add("--plot", type=Path, metavar="OUT", help="draw both sides into this SVG")


def run(options: argparse.Namespace) -> BenchReport:
    """Measure the disaggregated side, which sets the load, and the aggregated one with every chunk size, in turns.

    Raises:
        ConfigError: the engine's packages are not installed, or an option makes no sense.
    """
    workload, quick = _workload(options), options.quick
    if options.kv_transfer is not None:
        return _only_kv_transfer(options, workload)
    chunks = _QUICK_CHUNKS if quick else CHUNKS
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        stage = Stage(Path(directory), make_model(Path(directory), options.seed), workload)
        flags = disaggregated_flags()
        sides = {
            _DISAGGREGATED: flags,
            **{chunk: aggregated_flags(chunk) for chunk in (*chunks, WHOLE)},
        }
        if quick:  # the deployment that sets the load is measured as the disaggregated side
            del sides[_DISAGGREGATED]
        else:
            sides[_ALONE] = flags
        first = stage.set_load(
            flags,
            prefill_share=options.prefill_share,
            quiet_prompts=_QUICK_QUIET_PROMPTS if quick else _QUIET_PROMPTS,
            then_measure=quick,
        )
        measured = stage.run(sides, _turns(options), without_prompts=_ALONE)
    if first is not None:
        measured[_DISAGGREGATED] = [first]
    disaggregated, aggregated = measured[_DISAGGREGATED], {chunk: measured[chunk] for chunk in chunks}
    moved_bytes = round(workload.prompt_tokens_mean) * KV_BYTES_PER_TOKEN
    memcpy = memcpy_bytes_per_s(moved_bytes)
    level, alone = figures.point_of(_DISAGGREGATED, disaggregated), measured.get(_ALONE)
    points = [figures.point_of(chunk, measured) for chunk, measured in aggregated.items()]
    best = best_chunk(points, level.ttft_p99_ms)
    whole = figures.point_of(WHOLE, measured[WHOLE])
    rows = [Row("1 prefill, 1 decode", level)]
    if alone is not None:
        rows.append(Row("the same, no prompts", figures.point_of(_ALONE, alone), remark="limit"))
    rows += [
        Row("2 aggregated", point, str(point.chunk), "best" if point is best else "") for point in points
    ]
    print_table([*rows, Row("2 aggregated", whole, "whole")])
    if options.plot is not None:
        _write_plot(options.plot, plot.draw(level, points, best))
    found = (
        figures.compared(disaggregated, aggregated[best.chunk])
        | {"chunk_aggregated": best.chunk}
        | figures.curve(points)
        | figures.of_side("aggregated_whole", measured[WHOLE])
        | figures.kv_transfer(stage.quiet_kv_transfer_s, disaggregated, moved_bytes, memcpy)
        | {
            "prefill_ms": figures.median(stage.quiet_ttft_s) * 1e3,
            "prompts_per_s": stage.rate_per_s,
            "role_change_s": figures.median(stage.role_changes_s),
        }
    )
    return BenchReport(
        name="disagg",
        config=_config(options, workload, chunks),
        figures=found,
        samples=figures.samples_of(
            {"disaggregated": disaggregated, "aggregated_whole": measured[WHOLE]}
            | {f"aggregated_c{chunk}": side for chunk, side in aggregated.items()}
            | ({} if alone is None else {"alone": alone})
        ),
        limits={"memcpy_gb_per_s": memcpy / 1e9} | ({} if alone is None else figures.limits(best, alone)),
        problems=stage.problems + ([] if quick else _problems(found)),
    )


def _only_kv_transfer(options: argparse.Namespace, workload: StreamsAndPrompts) -> BenchReport:
    """Measure KV transfers with and without checksums, in turns of new deployments."""
    turns = _KV_TRANSFER_TURNS if options.turns is None and not options.quick else _turns(options)
    flags = {name: [*disaggregated_flags(), *more] for name, more in _CHECKSUMS.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in flags}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        model_dir = make_model(Path(directory), options.seed)
        for turn in range(turns):
            for name in list(flags)[:: -1 if turn % 2 else 1]:
                stage = Stage(Path(directory, f"{turn}-{name}"), model_dir, workload)
                stage.set_load(
                    flags[name], prefill_share=options.prefill_share, quiet_prompts=options.kv_transfer
                )
                seconds[name].append(stage.quiet_kv_transfer_s)
                problems += stage.problems
    moved_bytes = round(workload.prompt_tokens_mean) * KV_BYTES_PER_TOKEN
    memcpy = memcpy_bytes_per_s(moved_bytes)
    return BenchReport(
        name="disagg",
        config={
            "disaggregated": flags["summed"],
            "unsummed": _CHECKSUMS["unsummed"],
            "prompts": options.kv_transfer,
            "turns": turns,
            "seed": options.seed,
        },
        figures=figures.kv_transfers(seconds["summed"], seconds["unsummed"], moved_bytes, memcpy),
        samples={
            f"kv_transfer_s {name} {turn}": values
            for name, found in seconds.items()
            for turn, values in enumerate(found)
        },
        limits={"memcpy_gb_per_s": memcpy / 1e9},
        problems=problems,
    )


def _workload(options: argparse.Namespace) -> StreamsAndPrompts:
    missing = [package for package in ("torch", "transformers") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed; run `pip install penstock-llm[engine]`")
    if not 0 < options.prefill_share < 1:
        raise ConfigError(f"--prefill-share: must be > 0 and < 1, got {options.prefill_share:g}")
    expect_at_least(options, seconds=1, turns=1, streams=1, kv_transfer=1)
    shortest, longest = options.prompt_tokens
    if not PROMPT_TOKENS_MIN <= shortest <= longest <= PROMPT_TOKENS_MAX:
        raise ConfigError(
            f"--prompt-tokens: must be from {PROMPT_TOKENS_MIN} to {PROMPT_TOKENS_MAX}, the smaller one first, got {shortest} {longest}"
        )
    return StreamsAndPrompts(
        streams=options.streams or (_QUICK_STREAMS if options.quick else _STREAMS),
        seconds=options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS),
        prompt_tokens_min=shortest,
        prompt_tokens_max=longest,
        seed=options.seed,
        arrivals=options.arrivals,
    )


def _turns(options: argparse.Namespace) -> int:
    return int(options.turns or (_QUICK_TURNS if options.quick else _TURNS))


def _config(
    options: argparse.Namespace, workload: StreamsAndPrompts, chunks: tuple[int, ...]
) -> dict[str, object]:
    return {
        "model": SIZES | {"architecture": "llama", "dtype": "float32"},
        "streams": workload.streams,
        "stream_tokens": [workload.stream_input_tokens, workload.stream_output_tokens],
        "prompt_tokens": [workload.prompt_tokens_min, workload.prompt_tokens_max],
        "prompt_output_tokens": workload.prompt_output_tokens,
        "seconds": workload.seconds,
        "turns": _turns(options),
        "prefill_share": options.prefill_share,
        "arrivals": workload.arrivals,
        "disaggregated": disaggregated_flags(),
        "aggregated": aggregated_flags(chunks[0]),
        "chunks": list(chunks),
        "seed": options.seed,
        "quick": options.quick,
    }


def _problems(found: dict[str, float]) -> list[str]:
    problems = []
    if found["itl_p99_ratio"] < _RATIO_WANTED:
        problems.append(f"ITL p99 is {found['itl_p99_ratio']:.2g} times as low, expected {_RATIO_WANTED:g}")
    if found["output_tokens_ratio"] < 1:
        problems.append(f"{found['output_tokens_ratio']:.3g} times the output tokens/s, expected 1 or more")
    return problems


def _write_plot(path: Path, svg: str) -> None:
    try:
        path.write_text(svg)
    except OSError as error:
        raise ConfigError(f"--plot: {path}: cannot be written: {error.strerror}") from error
