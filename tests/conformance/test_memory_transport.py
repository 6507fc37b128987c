"""The reference transport, over a link within the process and over sockets."""

import pytest

from penstock.testing.peer_transport import PeerTransportSuite
from penstock.testing.transports.harness import TwoAgents
from penstock.transfer import TransferConfig
from penstock.transfer.transports.memory import MemoryTransport
from tests.support.endless_copies import EndlessCopies


def _memory() -> list[MemoryTransport]:
    return [MemoryTransport(threads=2, inline_bytes_max=64 << 10)]


class TestMemoryTransport(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return EndlessCopies(_memory, size_bytes=size_bytes, config=TransferConfig(listen=("memory",)))


@pytest.mark.nightly
class TestMemoryTransportWithSocketLinks(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return EndlessCopies(_memory, size_bytes=size_bytes)
