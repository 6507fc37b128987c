"""Forged KV events over real sockets: mutated payloads under any number, and servers that are no publishers.

What is held stays consistent, and the next sound events count.
"""

import asyncio
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.core.wire import hash_list
from penstock.engine.kv_events.engine_events import Omission
from penstock.engine.kv_events.subscriber import KvEventSubscriber, PublisherAddress
from penstock.engine.kv_events.translator import HexSalts
from tests.support.kv_publisher import KvPublisher, endpoints, publishing

zmq = pytest.importorskip("zmq")

SIZE = 4
MESSAGES = 10_000
NUMBER_MAX = (1 << 64) - 1
TOKENS = list(range(2 * SIZE))
MAP = {
    "type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": None, "token_ids": TOKENS, "block_size": SIZE,
    "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["00ff", ["ab12", 2]], None], "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}  # fmt: skip
SOUND = [
    [MAP, {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"}],
    [MAP | {"block_hashes": [13, -14], "parent_block_hash": 12, "extra_keys": None, "medium": "CPU"}],
    [
        ["BlockStored", [b"x" * 32, 15], None, TOKENS, SIZE, None, "STORAGE"],
        ["BlockRemoved", [15], "STORAGE"],
    ],
    [{"type": "AllBlocksCleared"}, MAP | {"token_ids": [], "block_hashes": [11]}],
]


class Held:
    """Keeps what a subscriber says is held."""

    def __init__(self, address: PublisherAddress) -> None:
        self.blocks: set[tuple[int, int]] = set()
        self.subscriber = KvEventSubscriber(
            address, block_size=SIZE, salt_of=HexSalts(), publish=lambda events: self.apply(list(events))
        )

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            blocks = {(event.tier, low) for low in hash_list(event.block_hashes)}
            if isinstance(event, BlockStored):
                assert event.block_size == SIZE
                self.blocks |= blocks
            elif isinstance(event, BlockRemoved):
                self.blocks -= blocks


def mutated(rng: random.Random, payload: bytes) -> bytes:
    message = bytearray(payload)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(message) or 1)
        match rng.randrange(4):
            case 0:
                message[at : at + 1] = rng.randbytes(1)
            case 1:
                del message[at : at + rng.randrange(1, 9)]
            case 2:
                message[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                message[at:at] = message[at : at + rng.randrange(1, 40)]
    return bytes(message)


def forged_number(rng: random.Random, number: int) -> int:
    """Give the right number mostly, else one that tells of a gap, a restart, or the end of all numbers."""
    if rng.random() < 0.9:
        return number
    return rng.choice(
        [0, NUMBER_MAX, NUMBER_MAX - 1, 1 << 63, number + 1, max(number - 1, 0), rng.getrandbits(64)]
    )


@pytest.mark.slow
@pytest.mark.within(240)
@pytest.mark.parametrize(
    "has_replay", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["replay", "no replay"]
)
async def test_forged_events_leave_the_subscriber_sound(tmp_path: Path, *, has_replay: bool) -> None:
    rng = random.Random(18)
    address = endpoints("ipc", tmp_path)
    if not has_replay:
        address = PublisherAddress(endpoint=address.endpoint)

    async def forge(publisher: KvPublisher, subscriber: KvEventSubscriber) -> None:
        for index in range(MESSAGES):
            payload = mutated(rng, msgspec.msgpack.encode([index * 0.5, rng.choice(SOUND), 0]))
            number = forged_number(rng, publisher.next)
            if number == publisher.next:
                publisher.kept.append((number, payload))
                publisher.next += 1
            frames = [b"kv", number.to_bytes(8, "big"), payload]
            if rng.random() < 0.02:
                frames = [rng.randbytes(rng.randrange(12)) for _ in range(rng.randrange(1, 6))]
            await publisher.events.send_multipart(frames)
            if index % 16 == 0:  # else most would be dropped
                await asyncio.sleep(0.002)
                subscriber._reader.check()

    held = Held(address)
    subscriber = held.subscriber
    async with publishing(address, keep=16) as publisher, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(subscriber.run())
        while not subscriber.batches:
            await publisher.send({"type": "AllBlocksCleared"})
            await asyncio.sleep(0.01)
        await forge(publisher, subscriber)
        assert subscriber.batches > MESSAGES // 4
        assert subscriber.omissions[Omission.MALFORMED] > MESSAGES // 10
        sound = MAP | {"extra_keys": None, "block_hashes": [21, 22]}
        while subscriber.num_blocks != 2 or len(held.blocks) != 2:
            await publisher.send({"type": "AllBlocksCleared"}, sound, sound)
            await asyncio.sleep(0.02)
        subscriber._reader.check()
        assert not following.done()
        following.cancel()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


def hold(content: bytes, connection: socket.socket) -> None:
    """Say something, and leave the connection open until the other side closes it."""
    connection.sendall(content)
    with suppress(TimeoutError):
        while connection.recv(4096):
            pass


def flood(connection: socket.socket) -> None:
    rng = random.Random(3)
    for _ in range(64):
        connection.sendall(rng.randbytes(65536))


NO_PUBLISHERS: dict[str, Callable[[socket.socket], None]] = {
    "closes": lambda _connection: None,
    "speaks HTTP": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "sends half a greeting": lambda connection: hold(GREETING[:30], connection),
    "sends noise": flood,
    "sends half a message": lambda connection: connection.sendall(GREETING + READY + b"\x01\x02kv\x01\x08"),
    "announces a huge message": lambda connection: hold(
        GREETING + READY + b"\x03" + (1 << 62).to_bytes(8, "big"), connection
    ),
}


@pytest.mark.parametrize("name", NO_PUBLISHERS)
async def test_a_publisher_is_followed_after_a_server_that_is_none(tmp_path: Path, name: str) -> None:
    """libzmq ended the whole process where a connection was lost while messages waited."""
    address = PublisherAddress(endpoint=endpoints("tcp", tmp_path).endpoint)
    stopping = threading.Event()

    def answer(listener: socket.socket) -> None:
        listener.settimeout(0.05)
        while not stopping.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(0.2)
                    NO_PUBLISHERS[name](connection)

    held = Held(address)
    following = asyncio.ensure_future(held.subscriber.run())
    port = int(address.endpoint.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener:
        answering = asyncio.to_thread(answer, listener)
        asyncio.get_running_loop().call_later(0.8, stopping.set)
        await answering
    async with publishing(address) as publisher:
        for _ in range(2):
            while len(held.blocks) != 2:
                await publisher.send({"type": "AllBlocksCleared"}, MAP | {"extra_keys": None})
                await asyncio.sleep(0.02)
            held.blocks.clear()
    assert not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
