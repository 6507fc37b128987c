"""Transport `shm`: arenas that both map, and private memory by way of the kernel."""

import pytest

from penstock.testing.peer_transport import PeerTransportSuite
from penstock.testing.transports.harness import Bytes, TwoAgents
from penstock.transfer import Arena
from penstock.transfer.transports.shm import ShmTransport
from tests.support.endless_copies import EndlessCopies


def _shm() -> list[ShmTransport]:
    return [ShmTransport(threads=2, inline_bytes_max=64 << 10)]


class _Arenas(EndlessCopies):
    def make_memory(self) -> tuple[Bytes, object]:
        arena = Arena.create(self.size_bytes)
        return arena.array, arena


class TestShmWithArenas(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return _Arenas(_shm, size_bytes=size_bytes)


@pytest.mark.slow
class TestShmWithPrivateMemory(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return TwoAgents(_shm, size_bytes=size_bytes)
