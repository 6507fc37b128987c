"""A log of the times at which an engine yielded tokens: latencies without network and frontend."""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Self

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types.load import Step
from penstock.core.wire import Wire, num_tokens

_log = get_logger()
_SUFFIX = ".steps.jsonl"


class LoggedStep(Wire, frozen=True):
    """One line: the time of a step and the number of tokens of each request in it.

    `at_s` is a clock that all processes of a host share; the event loop's has a resolution of milliseconds only.
    """

    at_s: float
    tokens: tuple[tuple[RequestId, int], ...]


_decoder = msgspec.json.Decoder(LoggedStep)


class StepLog:
    """A worker's file. One event loop owns it."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Create or truncate the file.

        Raises:
            OSError: the file cannot be written.
        """
        self.path = path
        self._file = path.open("wb")
        self._left_bytes = bytes_max

    @classmethod
    def open(cls, directory: str, name: str, bytes_max: int) -> Self:
        """Create a worker's file in a directory, which is created if missing.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            return cls(Path(directory, name + _SUFFIX), bytes_max)
        except OSError as error:
            raise ConfigError(
                f"worker.step_log: {directory}: {(error.strerror or str(error)).lower()}; give a directory that can be written"
            ) from error

    def note(self, step: Step) -> None:
        """Write a line for a step that yielded tokens, unless the file has reached its size limit."""
        tokens = tuple(
            (delta.request_id, num_tokens(delta.token_ids)) for delta in step.deltas if delta.token_ids
        )
        if not tokens or not self._left_bytes:
            return
        line = msgspec.json.encode(LoggedStep(at_s=perf_counter(), tokens=tokens)) + b"\n"
        if len(line) > self._left_bytes:
            self._left_bytes = 0
            _log.warning("step_log_full", path=str(self.path), effect="further steps are not written")
            return
        self._left_bytes -= len(line)
        self._file.write(line)

    def close(self) -> None:
        self._file.close()


def read_steps(directory: Path) -> dict[str, list[LoggedStep]]:
    """Read all step logs of a directory; worker name -> steps.

    Raises:
        msgspec.DecodeError: a file is no step log.
    """
    return {
        path.name.removesuffix(_SUFFIX): list(_lines(path)) for path in sorted(directory.glob("*" + _SUFFIX))
    }


def _lines(path: Path) -> Iterator[LoggedStep]:
    with path.open("rb") as lines:
        for line in lines:
            yield _decoder.decode(line)
