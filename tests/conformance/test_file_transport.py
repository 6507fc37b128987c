"""Transport `file`, on a slab."""

import tempfile
from pathlib import Path

from penstock.testing.transports.storage_harness import OwnStorage
from penstock.testing.transports.transport import TransportSuite
from penstock.transfer import FileRegion
from penstock.transfer.storage.file import FileStorage


class TestFileTransport(TransportSuite):
    large_bytes = 16 << 20

    @staticmethod
    def harness(size_bytes: int) -> OwnStorage:
        directory = tempfile.TemporaryDirectory()
        region = FileRegion(Path(directory.name) / "slab", size_bytes)
        harness = OwnStorage(FileStorage(threads=4, io_bytes=1 << 20), region)
        harness.on_exit(directory.cleanup)
        return harness
