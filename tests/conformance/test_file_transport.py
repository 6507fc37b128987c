"""Transport `file`, on a slot file."""

import tempfile
from pathlib import Path

from penstock.testing.transports.harness import OwnStorage
from penstock.testing.transports.transport import TransportSuite
from penstock.transfer import FileRegion
from penstock.transfer.storage.file import FileStorage


class TestFileTransport(TransportSuite):
    large_bytes = 16 << 20

    @staticmethod
    def harness(size_bytes: int) -> OwnStorage:
        directory = tempfile.TemporaryDirectory()
        region = FileRegion(Path(directory.name) / "kv", size_bytes)
        harness = OwnStorage(FileStorage(threads=4), region)
        harness.on_exit(directory.cleanup)
        return harness
