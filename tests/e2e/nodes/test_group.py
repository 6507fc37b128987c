"""The nodes of a worker: who is taken, who is refused and why, and that each learns of the others' end."""

import asyncio
import random
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.core.errors import ConfigError, PenstockError, ProtocolError, Unavailable
from penstock.deploy.nodes import NodeFollower, NodeLeader
from penstock.runtime.handshake import Identity

ARGUMENTS = {"tensor_parallel_size": 4, "seed": None}
TIMEOUT_S = 30.0


def identity(secret: bytes = b"a secret of all nodes") -> Identity:
    return Identity(process="worker-1", secret=secret)


@asynccontextmanager
async def leading(nodes: int = 3):
    async with (
        asyncio.timeout(2 * TIMEOUT_S),
        NodeLeader("tcp://127.0.0.1:0", identity(), nodes=nodes, arguments=ARGUMENTS) as leader,
    ):
        yield leader


async def joined(leader: NodeLeader, rank: int, **changes: Any) -> NodeFollower:
    settings = {"arguments": ARGUMENTS, "secret": identity().secret} | changes
    follower = NodeFollower(
        str(leader.address), identity(settings["secret"]), rank=rank, arguments=settings["arguments"]
    )
    await follower.join(TIMEOUT_S, random.Random(1))
    return follower


async def test_all_nodes_join_start_together_and_learn_of_an_end() -> None:
    async with leading() as leader:
        first = await joined(leader, 1)
        assert leader.missing == [2]
        second = await joined(leader, 2)
        await leader.gather(TIMEOUT_S)
        assert (first.own_address, first.leader_address) == ("127.0.0.1", "127.0.0.1")
        leader.start(4711)
        assert [await first.start(), await second.start()] == [4711, 4711]
        assert not leader.leaving.done()
        first.leave()
        await leader.leaving
        second.close("the test")
        assert (await leader.lost).startswith("node 2 of 3 (127.0.0.1:")
    assert "node 0 ended: it said goodbye" in await first.ended


@pytest.mark.parametrize(
    ("rank", "changes", "error", "text"),
    [
        (1, {"arguments": ARGUMENTS | {"seed": 3}}, ConfigError, "other arguments: seed 3 there and None on the leader"),
        (3, {}, ConfigError, "--node-rank 3: the leader's graph has 3 nodes"),
        (1, {"secret": b"a guess of a stranger"}, ProtocolError, "deployment secret: the peer's proof does not fit"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said_at_once(
    rank: int, changes: dict[str, Any], error: type[PenstockError], text: str
) -> None:
    async with leading() as leader:
        with pytest.raises(error, match=text):
            await joined(leader, rank, **changes)
        assert leader.missing == [1, 2]


async def test_who_is_missed_is_named_at_both_ends() -> None:
    async with leading() as leader:
        address = str(leader.address)
        await joined(leader, 1)
        again = NodeFollower(address, identity(), rank=1, arguments=ARGUMENTS)
        with pytest.raises(
            Unavailable, match=r"within 1 s: --node-rank 1: 127\.0\.0\.1:\d+ has joined with it"
        ):
            await again.join(1.0, random.Random(1))
        with pytest.raises(Unavailable, match=rf"node 2 of 3 .* did not join {address} within 0.1 s"):
            await leader.gather(0.1)
    nobody = NodeFollower(address, identity(), rank=2, arguments=ARGUMENTS)
    with pytest.raises(Unavailable, match=r"node 0 did not take this one at .* within 1 s: .*[Cc]onnect"):
        await nobody.join(1.0, random.Random(1))
