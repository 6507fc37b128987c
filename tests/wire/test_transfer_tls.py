"""TLS between agents: certificates of one authority, and clear words for everything else."""

import asyncio
import contextlib

import msgspec
import numpy as np
import pytest

from penstock.core.errors import ConfigError, PeerLost, ProtocolError
from penstock.transfer import TransferAgent, TransferConfig, TransferOp
from penstock.transfer.config import TlsConfig, TlsIdentity
from penstock.transfer.link.frames import decode_metadata, encode_metadata
from penstock.transfer.link.listener import Endpoint
from tests.support.certificates import make_authority, make_certificate
from tests.support.until import until

pytestmark = pytest.mark.needs("openssl")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    ours, theirs = make_authority(folder, "ours"), make_authority(folder, "theirs")
    return {
        "a": make_certificate(folder, "a", ours),
        "b": make_certificate(folder, "b", ours),
        "stranger": make_certificate(folder, "stranger", theirs),
    }


def _config(tls: TlsConfig | None) -> TransferConfig:
    return TransferConfig(
        listen=("tcp://127.0.0.1:0",),
        transports=("tcp",),
        tls=tls,
    )


@pytest.mark.parametrize("op", [TransferOp.READ, TransferOp.WRITE])
async def test_bytes_go_over_tls(files, op):
    async with (
        TransferAgent("a", _config(files["a"])) as agent,
        TransferAgent("b", _config(files["b"])) as other,
    ):
        random = np.random.default_rng(1)
        here, there = (random.integers(0, 256, 3 << 20, np.uint8) for _ in range(2))
        expected = (there if op is TransferOp.READ else here).reshape(-1, 4096)[::-1].reshape(-1)
        local = agent.register(here, "here").blocks(np.arange(768), 4096)
        other.register(there, "there")
        peer = await agent.connect(other.metadata())
        remote = peer.region("there").blocks(np.arange(768)[::-1], 4096)
        for checksum in (False, True, False):
            before = here.copy(), there.copy()
            await agent.post(op, local, remote, peer, checksum=checksum).wait()
            assert np.array_equal(here if op is TransferOp.READ else there, expected)
            here[:], there[:] = before
        await agent.post(op, local, remote, peer).wait()
        small = peer.region("there").ranges(5, 100)
        await agent.post(op, agent.register(np.zeros(100, np.uint8)).ranges(), small, peer).wait()
        connection = next(iter(agent._transports["tcp"]._room.streams))._socket
        assert connection.version() == "TLSv1.3"


@pytest.mark.parametrize("wrong", ["listener", "connecting"])
async def test_another_authoritys_certificate_is_refused_on_both_sides(files, wrong):
    ours, theirs = files["a"], files["stranger"]
    async with (
        TransferAgent("a", _config(theirs if wrong == "connecting" else ours)) as agent,
        TransferAgent("b", _config(theirs if wrong == "listener" else ours)) as other,
    ):
        with pytest.raises((ProtocolError, PeerLost), match=r"(?i)certificate|unknown ca"):
            await agent.connect(other.metadata())
        await until(lambda: other.refusals)
        assert other.counters.refused == {"protocol_error": 1}
        assert "TLS" in other.refusals[0].message


async def test_a_listener_with_another_certificate_of_the_authority_is_refused(files):
    async with (
        TransferAgent("a", _config(files["a"])) as agent,
        TransferAgent("b", _config(files["b"])) as other,
    ):
        metadata = decode_metadata(other.metadata())
        forged = msgspec.structs.replace(metadata, certificate=bytes(32))
        with pytest.raises(ProtocolError, match="another one than its metadata names"):
            await agent.connect(encode_metadata(forged))


@pytest.mark.parametrize("has_tls", ["a", "b"])
async def test_an_agent_without_tls_does_not_reach_one_that_has_it(files, has_tls):
    async with (
        TransferAgent("a", _config(files["a"] if has_tls == "a" else None)) as agent,
        TransferAgent("b", _config(files["b"] if has_tls == "b" else None)) as other,
    ):
        with pytest.raises(
            PeerLost, match=f"agent {has_tls} speaks TLS there and nothing else, agent . has no `tls`"
        ):
            await agent.connect(other.metadata())


@pytest.mark.parametrize("kind", [b"PTA link", b"PTA tlss"])
async def test_a_port_says_that_it_speaks_tls_or_does_not(files, kind):
    """To who connects in spite of what the metadata says."""
    is_tls = kind in {b"PTA tlsl", b"PTA tlss"}
    async with TransferAgent("b", _config(None if is_tls else files["b"])) as other:
        (address,) = decode_metadata(other.metadata()).addresses
        connection = await Endpoint(address, other.identity.token)._connect(1.0)
        loop = asyncio.get_running_loop()
        with connection:
            await loop.sock_sendall(connection, kind)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while more := await loop.sock_recv(connection, 4096):
                    answer += more
        assert b"TLS" in answer
        assert other.counters.refused == {"protocol_error": 1}


@pytest.mark.parametrize("data", [b"PTA tlsl" + b"x" * 400, b"PTA tlss" + b"x" * 400, b"PTA tlss"])
async def test_garbage_instead_of_a_handshake_is_refused(files, data):
    async with TransferAgent("b", _config(files["b"])) as other:
        (address,) = decode_metadata(other.metadata()).addresses
        connection = await Endpoint(address, other.identity.token)._connect(1.0)
        loop = asyncio.get_running_loop()
        with connection:
            await loop.sock_sendall(connection, data)
            if len(data) == 8:
                connection.shutdown(1)
            with contextlib.suppress(ConnectionError):
                while await loop.sock_recv(connection, 4096):
                    pass
        async with TransferAgent("a", _config(files["a"])) as friend:
            await friend.connect(other.metadata())


def test_wrong_files_are_named(files, tmp_path):
    (tmp_path / "empty").write_text("")
    for field in ("certificate", "key", "authority"):
        for path in (tmp_path / "missing", tmp_path / "empty"):
            with pytest.raises(ConfigError, match=str(path)):
                TlsIdentity(files["a"].model_copy(update={field: str(path)}))
    with pytest.raises(ConfigError, match="belong together"):
        TlsIdentity(files["a"].model_copy(update={"key": files["b"].key}))
