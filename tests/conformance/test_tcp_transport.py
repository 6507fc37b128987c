"""Transport `tcp`, over TCP, over unix sockets and with TLS."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import pytest

from penstock.testing.peer_transport import PeerTransportSuite
from penstock.testing.transports.harness import TwoAgents
from penstock.transfer import TransferConfig
from penstock.transfer.config import TcpConfig, TlsConfig
from penstock.transfer.transports.tcp.transport import TcpTransport
from tests.support.certificates import make_authority, make_certificate


def _tcp() -> list[TcpTransport]:
    return [TcpTransport(TcpConfig(), inline_bytes_max=64 << 10, idle_s=2.0)]


class TestTcpTransport(PeerTransportSuite):
    large_bytes = 24 << 20

    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return TwoAgents(_tcp, size_bytes=size_bytes, config=TransferConfig(listen=("tcp://127.0.0.1:0",)))


@pytest.mark.nightly
@pytest.mark.slow
class TestTcpTransportOverUnixSockets(PeerTransportSuite):
    large_bytes = 24 << 20

    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return TwoAgents(_tcp, size_bytes=size_bytes, config=TransferConfig(listen=("unix",)))


@functools.cache
def _tls() -> TlsConfig:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return make_certificate(folder, "agent", make_authority(folder, "authority"))


@pytest.mark.slow
@pytest.mark.needs("openssl")
class TestTcpTransportWithTls(PeerTransportSuite):
    large_bytes = 24 << 20

    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        config = TransferConfig(listen=("tcp://127.0.0.1:0",), tls=_tls())
        return TwoAgents(_tcp, size_bytes=size_bytes, config=config)
