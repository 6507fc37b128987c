"""Broadcasts as bytes: their proof, and the bytes of the last release."""

import pytest

from penstock.core.errors import ProtocolError
from penstock.core.types.events import BlockStored, EventBatch
from penstock.core.types.load import Broadcast, FrontendFigures, RankNews, WorkerLoad
from penstock.core.wire import pack_hashes
from penstock.runtime.events.nats import seal, unseal

BATCH = EventBatch(
    sequence=5, events=(BlockStored(block_hashes=pack_hashes([1]), parent_block_hash=None, block_size=16),)
)
LOAD = WorkerLoad(running_requests=2, number=7)
FIGURES = FrontendFigures.of(b"k" * 8, WorkerLoad(accepted_requests=3, peers=1, peer_arrivals=4))
BROADCAST = Broadcast(
    worker_id=9, ranks=(RankNews(rank=1, batches=(BATCH,), load=LOAD, frontends=(FIGURES,)),)
)


def test_what_was_sealed_is_read_with_the_secret():
    assert unseal(b"secret", seal(b"secret", BROADCAST)) == BROADCAST
    assert FIGURES.complete(LOAD) == WorkerLoad(
        running_requests=2, number=7, accepted_requests=3, peers=1, peer_arrivals=4
    )


@pytest.mark.parametrize("at", [0, 15, 16, -1])
def test_a_changed_byte_or_another_secret_is_refused(at):
    data = bytearray(seal(b"secret", BROADCAST))
    data[at] ^= 1
    with pytest.raises(ProtocolError, match="two deployments share one"):
        unseal(b"secret", bytes(data))
    with pytest.raises(ProtocolError, match="its proof does not fit"):
        unseal(b"other", seal(b"secret", BROADCAST))


def test_bytes_of_another_release_are_said():
    with pytest.raises(ProtocolError, match="cannot be read"):
        unseal(b"secret", seal(b"secret", {"ranks": 5}))


def test_the_bytes_are_those_of_the_last_release():
    assert seal(b"secret", BROADCAST).hex() == (
        "57eaa2971fa440e3c56de07e6105664782a9776f726b65725f696409a572616e6b739184a472616e6b01a762"
        "6174636865739183a474797065a56261746368a873657175656e636505a66576656e74739184a474797065a6"
        "73746f726564ac626c6f636b5f686173686573c4080100000000000000b1706172656e745f626c6f636b5f68"
        "617368c0aa626c6f636b5f73697a6510a46c6f6164de0002b072756e6e696e675f726571756573747302a66e"
        "756d62657207a966726f6e74656e64739184a36b6579c4086b6b6b6b6b6b6b6bb161636365707465645f7265"
        "71756573747303a5706565727301ad706565725f6172726976616c7304"
    )
