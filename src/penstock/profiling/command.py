"""The command `penstock profile`."""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.core.errors import ConfigError
from penstock.core.files import check_writable, write_whole
from penstock.perf.profile import Profile
from penstock.profiling.profiler import OnProgress, ProfileRequest, make_profile
from penstock.profiling.report import (
    FIT_COLUMNS,
    HELD_OUT_COLUMNS,
    about,
    fit_rows,
    held_out_rows,
    make_page,
    verdict,
)
from penstock.profiling.sweep import QUICK, SweepConfig
from penstock.profiling.target import Cell

_LISTS = ("prompt_tokens", "contexts", "batches")
_PAGE_SUFFIXES = {".html", ".htm"}
_LINES = 10


def run_command(options: argparse.Namespace) -> int:
    """Profile, print the tables, write the profile and its page; files are written only after all measurements.

    Raises:
        ConfigError: a flag, the target or the model is invalid, or a file cannot be written.
        EngineError, Unavailable: the engine or the endpoint failed.
    """
    config = sweep_config(options)
    out: Path = options.out
    page: Path = options.plot or out.with_suffix(".html")
    if page.suffix not in _PAGE_SUFFIXES:
        raise ConfigError(f"--plot: {page}: it is a page of charts; name it .html")
    if page == out:
        raise ConfigError(
            f"--out: {out}: the profile is JSON; name it .json, the page of charts stands beside it"
        )
    check_writable(out, flag="--out")
    check_writable(page, flag="--plot")
    wanted = ProfileRequest(
        target=options.target,
        model=options.model,
        hardware=options.hardware,
        settings=tuple(options.set),
        api_key=options.api_key,
    )
    try:
        with _progress() as on_progress:
            profile = asyncio.run(make_profile(wanted, config, on_progress))
    except KeyboardInterrupt:
        _warn("interrupted; nothing was written")
        raise
    profile.save(out)
    try:
        write_whole(page, make_page(profile).encode())
    except OSError as error:
        raise ConfigError(
            f"--plot: {page}: cannot be written: {error.strerror}; {out} is complete"
        ) from error
    _print(profile)
    print(f"wrote {out} and {page}")  # noqa: T201 - what a command is for
    return 0


def sweep_config(options: argparse.Namespace) -> SweepConfig:
    """Make the sweep config from flags.

    Raises:
        ConfigError: a flag has an invalid value.
    """
    config = QUICK if options.quick else SweepConfig()
    said: dict[str, Any] = {"seed": options.seed}
    for name in _LISTS:
        if (text := getattr(options, name)) is not None:
            said[name] = _counts(text, flag=f"--{name.replace('_', '-')}")
    for name, least in (("repeats", 1), ("held_out", 0)):
        if (count := getattr(options, name)) is not None:
            if count < least:
                raise ConfigError(f"--{name.replace('_', '-')}: must be >= {least}, got {count}")
            said[name] = count
    for flag, name, seconds in (
        ("--max-seconds", "max_seconds", options.max_seconds),
        ("--request-timeout", "request_timeout_s", options.request_timeout),
    ):
        if seconds is not None:
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{flag}: must be > 0, got {seconds:g}")
            said[name] = seconds
    return replace(config, **said)


def _counts(text: str, *, flag: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal() or not int(word)]
    if wrong:
        raise ConfigError(f"{flag}: {text!r}: expected whole numbers >= 1 with commas, as 16,64,256")
    return tuple(sorted({int(word) for word in words}))


def _print(profile: Profile) -> None:
    evaluation = profile.evaluation
    assert evaluation is not None, "judged"
    console = Console()
    heading = Table(show_header=False, box=None)
    for name, value in about(profile):
        heading.add_row(name, value)
    console.print(heading)
    for columns, rows in (
        (FIT_COLUMNS, fit_rows(evaluation)),
        (HELD_OUT_COLUMNS, held_out_rows(evaluation)),
    ):
        table = Table()
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in (*(f"left out: {text}" for text in evaluation.left_out_cells), *verdict(evaluation)):
        console.print(line, highlight=False, soft_wrap=True)


def _warn(text: str) -> None:
    print(f"penstock profile: {text}", file=sys.stderr, flush=True)  # noqa: T201 - what a command is for


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show a progress bar on a terminal, elsewhere a line per tenth."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def on_progress(done: int, total: int, cell: Cell) -> None:
            bar.update(task, completed=done, total=total, description=str(cell))

        yield on_progress


class _Lines:
    def __init__(self) -> None:
        self._told = -1

    def __call__(self, done: int, total: int, cell: Cell) -> None:
        if (tenth := done * _LINES // total) > self._told:
            self._told = tenth
            _warn(f"{done} of {total} measurements, next: {cell}")
