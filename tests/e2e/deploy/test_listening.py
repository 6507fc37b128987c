"""How connections are accepted: all that wait in one turn of the loop, and what happens without descriptors."""

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from penstock.core.listening import Address, Listener, listen
from penstock.frontend.limits.admission import ReceiveMetrics


class Peer(asyncio.Protocol):
    """Says hello, and counts who came."""

    made: int = 0

    def connection_made(self, transport) -> None:
        type(self).made += 1
        peer = transport.get_extra_info("socket")
        if peer.family != socket.AF_UNIX:
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.write(b"hello")
        transport.close()


@pytest.fixture(autouse=True)
def _nobody_came_yet() -> None:
    Peer.made = 0


def connect(address: Address, count: int) -> list[socket.socket]:
    """Connect without anybody accepting: the kernel does as far as the backlog goes."""
    return [socket.create_connection((address.host, address.port), timeout=10) for _ in range(count)]


def hear(peers: list[socket.socket]) -> None:
    for peer in peers:
        with peer:
            assert peer.recv(10) == b"hello"


def test_a_burst_is_accepted_in_few_turns_of_the_loop() -> None:
    async def main() -> None:
        listener, address = await listen(Peer, Address.parse("tcp://127.0.0.1:0", source="test"))
        peers = connect(address, 200)
        turns = 0
        while Peer.made < len(peers):
            await asyncio.sleep(0)
            turns += 1
            assert turns < 50
        await asyncio.sleep(0.01)
        hear(peers)
        listener.close()
        await listener.wait_closed()

    uvloop.run(main())


def test_closing_takes_those_that_wait_and_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        listener, address = await listen(Peer, Address.parse("tcp://127.0.0.1:0", source="test"))
        peers = connect(address, 100)
        listener.close()
        listener.close()
        await listener.wait_closed()
        assert Peer.made == 100
        with pytest.raises(ConnectionRefusedError):
            connect(address, 1)
        await asyncio.sleep(0.01)
        hear(peers)
        listener, address = await listen(Peer, Address.parse(f"unix://{tmp_path}/s", source="test"))
        assert Path(address.path).stat().st_mode & 0o777 == 0o600  # noqa: ASYNC240
        reader, writer = await asyncio.open_unix_connection(address.path)
        assert await reader.read() == b"hello"
        writer.close()
        listener.close()

    uvloop.run(main())


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_want_of_descriptors_is_logged_and_counted_and_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        opened = socket.socket()
        opened.bind(("127.0.0.1", 0))
        failures: list[OSError] = []
        registry = CollectorRegistry()
        metrics = ReceiveMetrics(registry, "penstock_frontend")

        def failed(error: OSError) -> None:
            failures.append(error)
            metrics.accept_failed(error)

        listener = Listener([opened], Peer, on_failure=failed)
        peers = connect(Address(host="127.0.0.1", port=opened.getsockname()[1]), 3)
        with no_descriptors():
            turns = 0
            while len(failures) < 2:
                await asyncio.sleep(0)
                turns += 1
            assert turns > 20, "it waits for many turns of the loop before it tries again"
            assert Peer.made == 0
            assert len(failures) == listener.failures
        counted = registry.get_sample_value("penstock_frontend_accept_failures_total", {"error": "EMFILE"})
        assert counted == len(failures)
        async with asyncio.timeout(60):
            while Peer.made < 3:  # noqa: ASYNC110 - the listener tries again by itself
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        hear(peers)
        listener.close()
        assert os.strerror(24) == failures[0].strerror

    uvloop.run(main())
    out, err = capfd.readouterr()
    assert (out + err).count("accept_failed") == 1
    assert "ulimit -n" in out + err
