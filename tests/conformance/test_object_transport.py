"""Transport `object`, on a store in memory and on a directory; tests/e2e has it on an S3 server."""

import tempfile

import pytest

from penstock.testing.transports.harness import OwnStorage
from penstock.testing.transports.transport import TransportSuite
from penstock.transfer import ObjectRegion
from penstock.transfer.storage.object import ObjectStorage


def _own_objects(url: str, size_bytes: int) -> OwnStorage:
    return OwnStorage(
        ObjectStorage(requests=4, request_timeout_s=10, retries=0),
        ObjectRegion(url, size_bytes, prefix="kv", object_bytes=1 << 20),
    )


class TestObjectTransport(TransportSuite):
    size_bytes = 5 << 19  # two objects and a half
    large_bytes = 16 << 20

    @staticmethod
    def harness(size_bytes: int) -> OwnStorage:
        return _own_objects("memory:///", size_bytes)


@pytest.mark.nightly
@pytest.mark.slow
class TestObjectTransportOnDirectory(TransportSuite):
    size_bytes = 5 << 19
    large_bytes = 16 << 20

    @staticmethod
    def harness(size_bytes: int) -> OwnStorage:
        directory = tempfile.TemporaryDirectory()
        harness = _own_objects(f"file://{directory.name}", size_bytes)
        harness.on_exit(directory.cleanup)
        return harness
