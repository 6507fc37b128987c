"""The command `penstock plan`."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.graph import DEMO_MODEL
from penstock.perf.hardware import find_hardware
from penstock.perf.model_config import known_shapes
from penstock.perf.pool import Demand
from penstock.plan.answer import OnProgress, PlanAnswer, find_answer
from penstock.plan.question import Question, graph_text
from penstock.plan.report import describe, make_page, make_report, rows
from penstock.plan.trial import Processes
from penstock.sim.outputs import check_outputs, put_out

_FILE_COLUMNS = 1000


def run_command(options: argparse.Namespace) -> int:
    """Plan, print the ranked table, write the output files; returns the exit code.

    Raises:
        ConfigError: a flag is invalid, or no layout fits or meets the targets.
        KeyboardInterrupt: after a line on stderr.
    """
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("penstock plan: interrupted; nothing was written", file=sys.stderr)  # noqa: T201 - command output
        raise


def _run(options: argparse.Namespace) -> int:
    question = Question(
        model=_name(options.model),
        hardware=find_hardware(options.hardware),
        devices=options.gpus,
        demand=Demand(
            input_tokens=options.isl,
            output_tokens=options.osl,
            ttft_s=options.slo_ttft,
            itl_s=options.slo_itl,
            percentile=options.percentile,
        ),
        formats={name: getattr(options, name) for name in ("weight_dtype", "expert_dtype", "kv_dtype")},
    )
    check_outputs({"--out": options.out, "--plot": options.plot, "--json": options.json})
    with _progress() as on_progress, Processes() as processes:
        answer = find_answer(
            question, processes, with_curve=options.plot is not None, on_progress=on_progress
        )
    put_out(
        partial(_print_table, answer),
        {
            "--out": (options.out, lambda: graph_text(question, answer.best.layout, describe(answer))),
            "--plot": (options.plot, lambda: make_page(answer)),
            "--json": (
                options.json,
                lambda: json.dumps(make_report(answer), indent=1, allow_nan=False) + "\n",
            ),
        },
    )
    return 0


def _name(model: str) -> str:
    """Give a model name that is valid in a graph anywhere: a directory becomes an absolute path."""
    path = Path(model).expanduser()
    return model if model in {*known_shapes(), DEMO_MODEL} or not path.exists() else str(path.resolve())


def _print_table(answer: PlanAnswer) -> None:
    head, *body = rows(answer)
    table = Table(title=describe(answer), title_justify="left")
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number == 1 else "right")
    for number, row in enumerate(body):
        table.add_row(*row, style="bold" if number == 0 else "")
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_COLUMNS  # no line breaks in a file
    console.print(table)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show a progress bar on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _total: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("searching", total=None)
        yield lambda done, total: bar.update(
            task, description="simulating the best", completed=done, total=total
        )
