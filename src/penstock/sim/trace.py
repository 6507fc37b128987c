"""Request traces: Azure's CSV and Mooncake's JSON lines, plain or gzipped, detected by content.

Sources: Azure/AzurePublicDataset (AzureLLMInferenceTrace_*.csv); kvcache-ai/Mooncake (FAST25-release/traces).
"""

import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated

import msgspec

from penstock.core.errors import ConfigError

PREFIX_BLOCK_TOKENS = 512
"""Prompt tokens per hash id of a Mooncake trace."""
SPAN_MAX_S = 366 * 86_400.0
"""Longest time span of a workload; a longer one means a wrong unit."""
TOKENS_MAX = 10_000_000
"""Most tokens of a prompt or output; far above every model's context."""

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_BYTES_MAX = 1 << 20
_QUOTED_MAX = 60
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: its time since the first one, and its token counts.

    `prefix_ids` are ids of its prompt's blocks of 512 tokens: equal leading ids are a shared prefix. Empty if the trace
    has none.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: float
    output_length: float
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()


OnBad = Callable[[ConfigError], None]
_Parse = Callable[[str], TraceRow]


def read_trace(path: Path, *, on_bad: OnBad | None = None) -> list[TraceRow]:
    """Read a trace, sorted by time.

    Args:
        path: the file.
        on_bad: called for each bad line, which is skipped; None raises for the first one.

    Raises:
        ConfigError: the file cannot be read, has an unknown format, or a bad line; the text has file and line.
    """
    reader = _Reader(path, on_bad)
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] == _GZIP_MAGIC:
                with gzip.open(file) as unpacked:
                    rows = list(reader.rows(unpacked))
            else:
                rows = list(reader.rows(file))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise reader.nothing_read()
    first_s = min(row.at_s for row in rows)
    return sorted((replace(row, at_s=row.at_s - first_s) for row in rows), key=lambda row: row.at_s)


class _Reader:
    """Parses lines to rows; the first line that fits a format decides the format."""

    def __init__(self, path: Path, on_bad: OnBad | None) -> None:
        self._path = path
        self._num_bad = 0
        self._first_problem = ""
        self._on_bad = on_bad
        self._parse: _Parse | None = None
        self._first_s: float | None = None

    def rows(self, file: IO[bytes] | gzip.GzipFile) -> Iterator[TraceRow]:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline(_LINE_BYTES_MAX)
                rest = line
                while len(rest) == _LINE_BYTES_MAX and not rest.endswith(b"\n"):
                    rest = file.readline(_LINE_BYTES_MAX)
            except (OSError, EOFError, zlib.error) as error:
                self._complain(number, f"the file is damaged or cut off here: {error}", error)
                return
            if not line:
                return
            try:
                row = self._row(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line)
            except (ValueError, msgspec.DecodeError) as error:
                self._complain(number, str(error), error)
            else:
                if row is not None:
                    yield row

    def nothing_read(self) -> ConfigError:
        """Make the error of a file without a row."""
        if not self._num_bad:
            return ConfigError(f"{self._path}: holds no request; expected at least one row")
        lines = "its only line is" if self._num_bad == 1 else f"all {self._num_bad:,} lines are"
        return ConfigError(f"{self._path}: holds no request: {lines} bad; the first: {self._first_problem}")

    def _complain(self, number: int, text: str, error: Exception) -> None:
        problem = ConfigError(f"{self._path}: line {number}: {text}")
        self._num_bad += 1
        self._first_problem = self._first_problem or f"line {number}: {text}"
        if self._on_bad is None:
            raise problem from error
        self._on_bad(problem)

    def _row(self, line: bytes) -> TraceRow | None:
        """Parse a line; None for a blank line or the header."""
        if len(line) == _LINE_BYTES_MAX:
            raise ValueError(f"expected less than {_LINE_BYTES_MAX:,} bytes in a line")
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise ValueError("expected UTF-8 text, got other bytes") from error
        if not text:
            return None
        if self._parse is None and not text.startswith("{"):
            self._parse = _azure_parser(text)
            return None
        row = (self._parse or _parse_mooncake)(text)
        self._parse = self._parse or _parse_mooncake
        self._check(row)
        return row

    def _check(self, row: TraceRow) -> None:
        if not (0 <= row.input_tokens <= TOKENS_MAX and 0 <= row.output_tokens <= TOKENS_MAX):
            raise ValueError(
                f"token counts must be from 0 to {TOKENS_MAX:,}, got {_short(row.input_tokens)}"
                f" and {_short(row.output_tokens)}"
            )
        blocks = row.input_tokens / PREFIX_BLOCK_TOKENS
        if row.prefix_ids and len(row.prefix_ids) not in {math.floor(blocks), math.ceil(blocks)}:
            raise ValueError(
                f"hash_ids: expected one for each {PREFIX_BLOCK_TOKENS} tokens of the prompt, {math.ceil(blocks):,} for"
                f" input_length {row.input_tokens:,}, got {len(row.prefix_ids):,}"
            )
        first_s = row.at_s if self._first_s is None else self._first_s
        if not abs(row.at_s - first_s) <= SPAN_MAX_S:
            raise ValueError(
                f"expected a time within {SPAN_MAX_S / 86_400:.0f} days of the first row's,"
                f" got one {abs(row.at_s - first_s) / 86_400:.3g} days from it; is its unit right?"
            )
        self._first_s = first_s


def _parse_mooncake(line: str) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=_MooncakeRow)
    except msgspec.DecodeError as error:
        raise ValueError(
            "expected a JSON object with the numbers timestamp (ms), input_length and output_length, and the list"
            f" hash_ids of numbers from 0 to 2^64-1: {error}"
        ) from error
    if max(row.hash_ids, default=0) >= 1 << 64:
        raise ValueError(f"hash_ids: expected numbers from 0 to 2^64-1, got {_short(max(row.hash_ids))}")
    return TraceRow(
        row.timestamp / 1000,
        _count("input_length", row.input_length),
        _count("output_length", row.output_length),
        row.hash_ids,
    )


def _azure_parser(header: str) -> _Parse:
    names = [name.strip() for name in header.split(",")]
    missing = [name for name in _AZURE_COLUMNS if name not in names]
    if missing:
        raise ValueError(
            f"expected an Azure trace, whose header has {', '.join(_AZURE_COLUMNS)}, or a Mooncake trace, "
            f"one JSON object a line; got {_short(header)}"
        )
    at, context, generated = (names.index(name) for name in _AZURE_COLUMNS)

    def parse(line: str) -> TraceRow:
        values = line.split(",")
        if len(values) != len(names):
            raise ValueError(f"expected {len(names)} columns, got {len(values)}")
        return TraceRow(
            _timestamp_s(values[at].strip()),
            _count(names[context], values[context]),
            _count(names[generated], values[generated]),
        )

    return parse


def _timestamp_s(value: str) -> float:
    try:
        when = datetime.fromisoformat(value)
        return when.replace(tzinfo=when.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"TIMESTAMP: expected a date and time as 2023-11-16 18:15:46.68, got {_short(value)}"
        ) from error


def _count(name: str, value: str | float) -> int:
    """Read a number of tokens; tables with empty cells have 100.0 for 100."""
    try:
        number = float(value)
        if number.is_integer():
            return int(number)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}: expected a whole number, got {_short(value)}") from error
    raise ValueError(f"{name}: expected a whole number, got {_short(value)}")


def _short(value: object) -> str:
    """Quote a value, shortened."""
    text = repr(value)
    return text if len(text) <= _QUOTED_MAX else f"{text[:_QUOTED_MAX]}..."
