"""The files that a command writes, and its table: seen to beforehand, and all written that can be."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from penstock.core.errors import ConfigError, PenstockError


def check_outputs(files: Mapping[str, Path | None], inputs: Sequence[str | Path] = ()) -> None:
    """See now that files can be written, and not at the end of a long run.

    Args:
        files: by flag; None where it was not given.
        inputs: what is read, and so must not be overwritten.

    Raises:
        ConfigError: one cannot be, is read or is given twice.
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
    """Write all that can be written, and only then tell what could not.

    Args:
        table: prints to stdout; it comes last.
        files: by flag, the file and what makes its text; nothing is made for None.

    Raises:
        PenstockError: one line for each that could not be written.
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
            if name == "stdout":  # else the interpreter tries again when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if problems:
        raise PenstockError("\n".join(problems))


def _write(path: Path, make: Callable[[], str]) -> None:
    path.write_text(make(), encoding="utf-8")
