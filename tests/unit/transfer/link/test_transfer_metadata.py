"""What agents hand to each other, and what is made of garbage."""

import msgspec
import numpy as np
import pytest

from penstock.core.errors import PeerLost, ProtocolError, TransferRefused
from penstock.sim.loop.loop import run_virtual
from penstock.transfer import TransferAgent, TransferConfig
from penstock.transfer.link.metadata import TRANSFER_VERSION, decode_metadata, encode_metadata

IN_PROCESS = TransferConfig(listen=("memory",))


def test_one_slab_takes_few_bytes():
    async def scenario():
        async with TransferAgent("decode-worker-17.pool.example", IN_PROCESS) as agent:
            agent.register(np.zeros(1 << 16, np.uint8), "kv")
            return len(agent.metadata())

    assert run_virtual(scenario()) <= 512


def test_metadata_names_what_it_is_asked_to():
    async def scenario():
        async with TransferAgent("a", IN_PROCESS) as agent:
            first = agent.register(np.zeros(64, np.uint8), "first")
            agent.register(np.zeros(32, np.uint8), "second")
            some = decode_metadata(agent.metadata([first]))
            everything = decode_metadata(agent.metadata())
            await agent.deregister(first)
            with pytest.raises(TransferRefused, match="not registered"):
                agent.metadata([first])
            return [info.name for info in some.regions], [info.name for info in everything.regions]

    assert run_virtual(scenario()) == (["first"], ["first", "second"])


@pytest.mark.parametrize(
    "garbage", [b"", b"PTA", b"PTA\n", b"PTA\n\xc1", b"x" * 200, b"PTA\n" + b"\x91" * 5000]
)
def test_garbage_is_no_metadata(garbage):
    with pytest.raises(ProtocolError, match="agent metadata"):
        decode_metadata(garbage)


def test_a_foreign_version_is_refused_and_a_neighbour_is_not():
    async def scenario():
        async with TransferAgent("a", IN_PROCESS) as agent:
            return decode_metadata(agent.metadata())

    metadata = run_virtual(scenario())
    neighbour = msgspec.structs.replace(metadata, version=TRANSFER_VERSION + 1)
    assert decode_metadata(encode_metadata(neighbour)) == neighbour
    with pytest.raises(ProtocolError, match="transfer version 9"):
        decode_metadata(encode_metadata(msgspec.structs.replace(metadata, version=9)))


def test_an_agent_does_not_connect_to_itself_or_to_one_that_is_gone():
    async def scenario():
        async with TransferAgent("a", IN_PROCESS) as agent:
            with pytest.raises(ProtocolError, match="its own metadata"):
                await agent.connect(agent.metadata())
            async with TransferAgent("b", IN_PROCESS) as other:
                metadata = other.metadata()
            with pytest.raises(PeerLost, match="agent b cannot be reached"):
                await agent.connect(metadata)
            with pytest.raises(PeerLost, match="agent b is not connected"):
                agent.send_notification("b", b"")

    run_virtual(scenario())
