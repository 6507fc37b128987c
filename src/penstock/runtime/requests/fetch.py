"""Transfer of model-card files: the worker cuts them into chunks, the frontend joins and verifies them."""

import hashlib
from collections.abc import Iterator

from penstock.core.errors import ProtocolError, RequestError

CHUNK_BYTES = 64 << 10  # small compared to a write buffer, so that deltas can pass between chunks
FETCHES_MAX = 16  # concurrent files on one connection


def chunks(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield (bytes, is_last) chunks of a file; an empty file is one empty chunk."""
    for start in range(0, max(1, len(content)), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES], start + CHUNK_BYTES >= len(content)


def missing_file(sha256: str) -> RequestError:
    return RequestError(f"no file {sha256} here; ask a worker of the same model", http_status=404)


class FileReceiver:
    """Joins the chunks of one file."""

    def __init__(self, sha256: str, bytes_max: int) -> None:
        self._sha256 = sha256
        self._bytes_max = bytes_max
        self._content = bytearray()
        self._digest = hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Append a chunk.

        Raises:
            ProtocolError: the file is longer than `bytes_max`.
        """
        if len(self._content) + len(data) > self._bytes_max:
            raise ProtocolError(
                f"file {self._sha256}: more than {self._bytes_max} bytes; raise file_bytes_max, or make it smaller"
            )
        self._content += data
        self._digest.update(data)

    def finish(self) -> bytes:
        """Return the content.

        Raises:
            ProtocolError: its hash differs from the requested one.
        """
        got = self._digest.hexdigest()
        if got != self._sha256:
            raise ProtocolError(
                f"file {self._sha256}: its content has the hash {got}; it was changed where the worker runs: "
                "restart that worker"
            )
        return bytes(self._content)
