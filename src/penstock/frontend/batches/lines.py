"""The lines of a batch's input: checked before the batch runs, then read in order. These functions block."""

import codecs
import hashlib
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from penstock.frontend.batches.objects import BatchError, BatchLine

ERRORS_MAX = 100
CUSTOM_ID_CHARACTERS_MAX = 512
_decode = msgspec.json.Decoder(BatchLine).decode


class _CustomId(msgspec.Struct):
    custom_id: str


_decode_id = msgspec.json.Decoder(_CustomId).decode


def check_input(
    path: Path, endpoint: str, *, requests_max: int, line_bytes_max: int
) -> tuple[int, list[BatchError]]:
    """Count the requests of an input, and list what is wrong with it, at most `ERRORS_MAX` problems."""
    errors: list[BatchError] = []
    seen: set[bytes] = set()
    total = 0
    with path.open("rb") as file:
        for number, line in _numbered(file, line_bytes_max):
            total += 1
            problem = _problem(line, endpoint, seen, line_bytes_max)
            if total > requests_max:
                text = f"more than {requests_max} requests, requests_max; split the file"
                problem = ("too_many_requests", text, None)
            if problem is not None:
                code, message, param = problem
                errors.append(BatchError(code=code, message=message, line=number, param=param))
                if len(errors) >= ERRORS_MAX or total > requests_max:
                    return total, errors
    if not total:
        errors.append(BatchError(code="empty_file", message="the input file has no requests"))
    return total, errors


def read_lines(path: Path, done: AbstractSet[bytes], line_bytes_max: int) -> Iterator[BatchLine]:
    """Give the requests of a checked input whose custom ids are not `done` (see `digest`)."""
    with path.open("rb") as file:
        for _, line in _numbered(file, line_bytes_max):
            request = _decode(line)
            if digest(request.custom_id) not in done:
                yield request


def read_done(path: Path) -> set[bytes]:
    """Give the digests of the custom ids in an output; a last line that was not written whole is cut off."""
    done: set[bytes] = set()
    if not path.exists():
        return done
    whole_bytes = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            done.add(digest(_decode_id(line).custom_id))
            whole_bytes += len(line)
        file.truncate(whole_bytes)
    return done


def digest(custom_id: str) -> bytes:
    """Shorten an id, of which a batch may have many, to 16 bytes."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _numbered(file: object, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Give the lines with their numbers, empty ones and a byte order mark left out, each cut after `line_bytes_max` + 1 bytes."""
    number, is_rest = 0, False
    while line := file.readline(line_bytes_max + 2):  # type: ignore[attr-defined]
        continues, is_rest = is_rest, not line.endswith(b"\n")
        if continues:
            continue
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # of editors on Windows
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _problem(
    line: bytes, endpoint: str, seen: set[bytes], line_bytes_max: int
) -> tuple[str, str, str | None] | None:
    """Give (code, text, field) of what is wrong with a line; None if nothing is."""
    if len(line) > line_bytes_max:
        text = f"the line is longer than {line_bytes_max} bytes, frontend.body_bytes_max"
        return "line_too_long", text, None
    try:
        request = _decode(line)
    except (ValueError, RecursionError) as error:
        return "invalid_json_line", f"the line is no request: {error}", None
    custom_id = request.custom_id
    key = digest(custom_id)
    problem: tuple[str, str, str | None] | None = None
    if not 1 <= len(custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
        text = f"custom_id: must have 1 to {CUSTOM_ID_CHARACTERS_MAX} characters, got {len(custom_id)}"
        problem = "invalid_custom_id", text, "custom_id"
    elif key in seen:
        problem = "duplicate_custom_id", f"custom_id: {custom_id[:40]!r} is not unique", "custom_id"
    elif request.method != "POST":
        problem = "invalid_method", f"method: must be 'POST', got {request.method[:40]!r}", "method"
    elif request.url != endpoint:
        text = f"url: must be {endpoint!r}, the batch's endpoint, got {request.url[:40]!r}"
        problem = "invalid_url", text, "url"
    elif not bytes(request.body).lstrip().startswith(b"{"):
        problem = "invalid_body", "body: must be an object", "body"
    seen.add(key)
    return problem
