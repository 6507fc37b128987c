"""Output files and table of a command: checked before a run, written after it."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from penstock.core.errors import ConfigError, PenstockError


def check_outputs(files: Mapping[str, Path | None], inputs: Sequence[str | Path] = ()) -> None:
    """Check before a long run that the output files can be written.

    Args:
        files: by flag; None if not given.
        inputs: input files, which must not be overwritten.

    Raises:
        ConfigError: a file cannot be written, is an input, or is given twice.
    """
    taken = {Path(path).resolve(): f"is read as {path}" for path in inputs}
    for flag, path in files.items():
        if path is None:
            continue
        if str(path) == "-":
            raise ConfigError(f"{flag}: -: expected a file; the table goes to stdout, as in {flag} FILE")
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"{flag}: {path}: expected a file in a directory that exists")
        if path.resolve() in taken:
            raise ConfigError(
                f"{flag}: {path}: would be overwritten: it {taken[path.resolve()]}; give another"
            )
        taken[path.resolve()] = f"is written by {flag}"
        existed = path.exists()
        try:
            path.open("a").close()
            if not existed:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"{flag}: {path}: cannot be written: {error.strerror or error}") from error


def put_out(table: Callable[[], None], files: Mapping[str, tuple[Path | None, Callable[[], str]]]) -> None:
    """Write all files that can be written, then report those that could not.

    Args:
        table: prints to stdout, last.
        files: by flag, (file, function that makes its text); None files are skipped.

    Raises:
        PenstockError: one line per file that could not be written.
    """
    outputs: list[tuple[str, Callable[[], None]]] = [
        (f"{flag}: {path}", partial(_write, path, make)) for flag, (path, make) in files.items() if path
    ]
    outputs.append(("stdout", table))
    problems = []
    for name, write in outputs:
        try:
            write()
        except OSError as error:
            problems.append(f"{name}: cannot be written: {error.strerror or error}")
            if name == "stdout":  # else the interpreter flushes it again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if problems:
        raise PenstockError("\n".join(problems))


def _write(path: Path, make: Callable[[], str]) -> None:
    path.write_text(make(), encoding="utf-8")
