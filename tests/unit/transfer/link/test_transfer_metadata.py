"""What agents hand to each other, and what is made of garbage."""

import msgspec
import numpy as np
import pytest

from penstock.core.errors import PeerLost, ProtocolError, TransferRefused
from penstock.transfer import TransferAgent, TransferConfig
from penstock.transfer.link.frames import TRANSFER_VERSION, decode_metadata, encode_metadata

IN_PROCESS = TransferConfig(listen=("memory",))


@pytest.mark.virtual
async def test_metadata_names_what_it_is_asked_to_in_few_bytes():
    async with TransferAgent("decode-worker-17.pool.example", IN_PROCESS) as agent:
        first = agent.register(np.zeros(1 << 16, np.uint8), "first")
        assert len(agent.metadata()) <= 512
        agent.register(np.zeros(32, np.uint8), "second")
        assert [info.name for info in decode_metadata(agent.metadata([first])).regions] == ["first"]
        assert [info.name for info in decode_metadata(agent.metadata()).regions] == ["first", "second"]
        await agent.deregister(first)
        with pytest.raises(TransferRefused, match="not registered"):
            agent.metadata([first])


@pytest.mark.parametrize(
    "garbage", [b"", b"PTA", b"PTA\n", b"PTA\n\xc1", b"x" * 200, b"PTA\n" + b"\x91" * 5000]
)
def test_garbage_is_no_metadata(garbage):
    with pytest.raises(ProtocolError, match="agent metadata"):
        decode_metadata(garbage)


@pytest.mark.virtual
async def test_a_foreign_version_is_refused_and_a_neighbour_is_not():
    async with TransferAgent("a", IN_PROCESS) as agent:
        metadata = decode_metadata(agent.metadata())
    neighbour = msgspec.structs.replace(metadata, version=TRANSFER_VERSION + 1)
    assert decode_metadata(encode_metadata(neighbour)) == neighbour
    with pytest.raises(ProtocolError, match="transfer version 9"):
        decode_metadata(encode_metadata(msgspec.structs.replace(metadata, version=9)))


@pytest.mark.virtual
async def test_an_agent_does_not_connect_to_itself_or_to_one_that_is_gone():
    async with TransferAgent("a", IN_PROCESS) as agent:
        with pytest.raises(ProtocolError, match="its own metadata"):
            await agent.connect(agent.metadata())
        async with TransferAgent("b", IN_PROCESS) as other:
            metadata = other.metadata()
        with pytest.raises(PeerLost, match="agent b cannot be reached"):
            await agent.connect(metadata)
        with pytest.raises(PeerLost, match="agent b is not connected"):
            agent.send_notification("b", b"")
