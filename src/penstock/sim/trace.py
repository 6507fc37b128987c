"""Request traces: Azure's CSV and Mooncake's JSON lines, plain or gzipped, told apart by their content.

Sources: Azure/AzurePublicDataset (AzureLLMInferenceTrace_*.csv); kvcache-ai/Mooncake (FAST25-release/traces).
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.core.errors import ConfigError

PREFIX_BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's hash ids stands for."""
_GZIP_MAGIC = b"\x1f\x8b"
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: when it came, counted from the first one, and how long it was.

    `prefix_ids` names its prompt's blocks of 512 tokens: equal leading ids are a shared prefix. Empty where the
    trace does not tell.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


OnBad = Callable[[ConfigError], None]


def read_trace(path: Path, *, on_bad: OnBad | None = None) -> list[TraceRow]:
    """Read a trace, in order of time.

    Args:
        path: the file.
        on_bad: told of each row that is wrong, which is then left out; None makes the first one an error.

    Raises:
        ConfigError: the file cannot be read, is of no known format, or has a wrong row; file and line are named.
    """
    try:
        with path.open("rb") as file:
            compressed = file.peek(2)[:2] == _GZIP_MAGIC
            with io.TextIOWrapper(gzip.open(file) if compressed else file, encoding="utf-8") as text:
                rows = list(_rows(path, text, on_bad))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a trace: it is not UTF-8 text") from error
    if not rows:
        raise ConfigError(f"{path}: holds no request; expected at least one row")
    first_s = min(row.at_s for row in rows)
    return sorted((replace(row, at_s=row.at_s - first_s) for row in rows), key=lambda row: row.at_s)


def _rows(path: Path, lines: Iterator[str], on_bad: OnBad | None) -> Iterator[TraceRow]:
    parse: Callable[[str], TraceRow] | None = None
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if not stripped:
            continue
        try:
            if parse is None and not stripped.startswith("{"):
                parse = _azure_parser(stripped)
                continue
            parse = parse or _parse_mooncake
            row = parse(stripped)
            if row.input_tokens < 0 or row.output_tokens < 0:
                raise ValueError(  # noqa: TRY301 - joins the other mistakes of a line
                    f"token counts must be >= 0, got {row.input_tokens} and {row.output_tokens}"
                )
        except (ValueError, msgspec.DecodeError) as error:
            problem = ConfigError(f"{path}: line {number}: {error}")
            if on_bad is None or parse is None:
                raise problem from error
            on_bad(problem)
        else:
            yield row


def _parse_mooncake(line: str) -> TraceRow:
    row = msgspec.json.decode(line, type=_MooncakeRow)
    return TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _azure_parser(header: str) -> Callable[[str], TraceRow]:
    names = header.split(",")
    missing = [name for name in _AZURE_COLUMNS if name not in names]
    if missing:
        raise ValueError(
            f"expected an Azure trace, whose header has {', '.join(_AZURE_COLUMNS)}, or a Mooncake trace, "
            f"one JSON object a line; got {header[:80]!r}"
        )
    at, context, generated = (names.index(name) for name in _AZURE_COLUMNS)

    def parse(line: str) -> TraceRow:
        values = line.split(",")
        if len(values) != len(names):
            raise ValueError(f"expected {len(names)} columns, got {len(values)}")
        return TraceRow(
            _timestamp_s(values[at]),
            _count(names[context], values[context]),
            _count(names[generated], values[generated]),
        )

    return parse


def _timestamp_s(value: str) -> float:
    try:
        when = datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(
            f"TIMESTAMP: expected a date and time as 2023-11-16 18:15:46.68, got {value!r}"
        ) from error
    return when.replace(tzinfo=when.tzinfo or UTC).timestamp()


def _count(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"{name}: expected a whole number, got {value!r}") from error
