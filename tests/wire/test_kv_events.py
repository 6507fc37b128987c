"""A subscriber and a publisher over real sockets: what was missed is replayed or everything is forgotten, and forged events harm nothing."""

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError
from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.core.wire import hash_list
from penstock.engine.kv_events import subscriber
from penstock.engine.kv_events.events import Omission
from penstock.engine.kv_events.subscriber import KvEventSubscriber, PublisherAddress
from penstock.engine.kv_events.translator import HexSalts
from tests.support.kv_publisher import KvPublisher, endpoints, publishing
from tests.support.until import until

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

SIZE = 2


class Publisher(KvPublisher):
    async def store(self, *roots: int, lost: bool = False, life: int = 0) -> None:
        """Store a block of a prompt of its own for each number."""
        await self.send(*(stored(root, life) for root in roots), lost=lost)


def stored(root: int, life: int = 0) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": [1000 * life + root], "parent_block_hash": None, "token_ids": [root] * SIZE,
        "block_size": SIZE, "medium": "GPU",
    }  # fmt: skip


def removed(root: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [root], "medium": "GPU"}


def name(root: int) -> int:
    return hash_list(block_hashes([root] * SIZE, SIZE)[:, 0])[0]


class Watcher:
    """Runs a subscriber and keeps what it says is held."""

    def __init__(self, address: PublisherAddress, size: int = SIZE) -> None:
        self.held: set[int] = set()
        self.clears = 0
        self.subscriber = KvEventSubscriber(
            address, block_size=size, salt_of=HexSalts(), publish=lambda events: self.apply(list(events))
        )

    def apply(self, events: list[KvEvent]) -> None:
        assert events
        for event in events:
            match event:
                case BlockStored():
                    self.held.update(hash_list(event.block_hashes))
                case BlockRemoved():
                    self.held.difference_update(hash_list(event.block_hashes))
                case AllBlocksCleared():
                    self.held.clear()
                    self.clears += 1

    async def holds(self, *roots: int) -> None:
        want = {name(root) for root in roots}
        await until(lambda: self.held == want)

    def counts(self) -> dict[Omission, int]:
        return dict(self.subscriber.omissions)


@asynccontextmanager
async def watching(address: PublisherAddress) -> AsyncIterator[Watcher]:
    watcher = Watcher(address)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.subscriber.run())
        try:
            yield watcher
        finally:
            running.cancel()


async def connected(publisher: Publisher, watcher: Watcher) -> None:
    """Send until a message arrives: a PUB socket sends nothing to those that are not there yet."""
    while not watcher.held:
        await publisher.store(0)
        await asyncio.sleep(0.02)


@pytest.fixture(params=["ipc", pytest.param("tcp", marks=pytest.mark.nightly)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> PublisherAddress:
    return endpoints(request.param, tmp_path)


def without_replay(address: PublisherAddress) -> PublisherAddress:
    return PublisherAddress(endpoint=address.endpoint)


async def test_events_from_before_the_start_are_replayed(address: PublisherAddress) -> None:
    async with publishing(address, kind=Publisher) as publisher:
        await publisher.store(1, 2, lost=True)
        await publisher.send(removed(1), lost=True)
        async with watching(address) as watcher:
            await watcher.holds(2)
            await publisher.store(3)
            await watcher.holds(2, 3)
            assert watcher.counts() == {}
            assert watcher.clears == 0


async def test_a_gap_is_replayed(address: PublisherAddress) -> None:
    async with publishing(address, kind=Publisher) as publisher, watching(address) as watcher:
        await publisher.store(1)
        await watcher.holds(1)
        await publisher.store(2, 3, lost=True)
        await publisher.send(removed(1), lost=True)
        await publisher.store(4)
        await watcher.holds(2, 3, 4)
        await publisher.store(5)
        await watcher.holds(2, 3, 4, 5)
        assert publisher.replays[0] == 0
        assert watcher.counts() == {}
        assert watcher.clears == 0


@pytest.mark.parametrize("fault", [{"skipped": {4}}, {"replayed_at_once": 3}], ids=["gaps", "no end"])
async def test_a_replay_that_is_not_whole_is_asked_for_again(
    address: PublisherAddress, fault: dict[str, Any]
) -> None:
    """Its end is dropped by a ROUTER socket whose queue is full."""
    async with publishing(address, kind=Publisher) as publisher, watching(address) as watcher:
        await publisher.store(1)
        await watcher.holds(1)
        vars(publisher).update(fault)
        for root in range(2, 8):
            await publisher.store(root, lost=True)
        await publisher.store(8)
        await watcher.holds(*range(1, 9))
        assert watcher.counts() == {}


async def test_a_gap_that_is_kept_no_longer_clears(address: PublisherAddress) -> None:
    async with publishing(address, keep=2, kind=Publisher) as publisher, watching(address) as watcher:
        await publisher.store(1)
        await watcher.holds(1)
        for root in range(2, 8):
            await publisher.store(root, lost=True)
        await publisher.store(8)
        await watcher.holds(7, 8)
        assert watcher.counts() == {Omission.LOST: 1}
        assert watcher.clears == 1
        await publisher.send(removed(1), stored(9))
        await watcher.holds(7, 8, 9)


@pytest.mark.parametrize("omission", [Omission.LOST, Omission.RESTART])
async def test_without_replay_a_gap_and_numbers_that_begin_again_clear(
    address: PublisherAddress, omission: Omission
) -> None:
    where = without_replay(address)
    async with publishing(where, kind=Publisher) as publisher, watching(where) as watcher:
        await connected(publisher, watcher)
        await publisher.store(1)
        await watcher.holds(0, 1)
        publisher.next = 0 if omission is Omission.RESTART else publisher.next + 1
        await publisher.store(3)
        await watcher.holds(3)
        assert watcher.counts() == {omission: 1}


async def test_an_address_where_nobody_publishes_or_replays_is_told(
    address: PublisherAddress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subscriber, "_ABSENT_S", 0.05)
    monkeypatch.setattr(subscriber, "_REPLAY_S", 0.05)
    absent = PublisherAddress(endpoint="tcp://127.0.0.1:9")
    wrong = PublisherAddress(endpoint=address.endpoint, replay_endpoint=f"ipc://{tmp_path}/nobody")
    with capture_logs() as logs:
        async with watching(absent) as watcher:
            await until(lambda: logs)
        async with publishing(address, kind=Publisher) as publisher, watching(wrong) as watcher:
            await connected(publisher, watcher)
            await until(lambda: len(logs) > 1)
    events = [line["event"] for line in logs]
    assert events[0] == "kv_events_nobody_publishes"
    assert "kv_events_replay_silent" in events


@pytest.mark.parametrize("has_replay", [True, False])
async def test_a_publisher_that_begins_anew_has_nothing_of_before(
    address: PublisherAddress, *, has_replay: bool
) -> None:
    where = address if has_replay else without_replay(address)
    async with watching(where) as watcher:
        async with publishing(where, kind=Publisher) as publisher:
            await connected(publisher, watcher)
            await publisher.store(1)
            await publisher.store(2)
            await watcher.holds(0, 1, 2)
        async with publishing(where, kind=Publisher) as publisher:
            if has_replay:
                await publisher.store(3, life=1, lost=True)
                await watcher.holds(3)
                assert watcher.counts() == {Omission.RESTART: 1}
            else:
                await until(lambda: not watcher.held)
                await connected(publisher, watcher)
            await publisher.store(4, life=1)
            await watcher.holds(3 if has_replay else 0, 4)
            assert watcher.clears == 1


async def test_a_publisher_that_comes_back_unchanged_loses_nothing(address: PublisherAddress) -> None:
    """Its numbers go on, and its latest batch is the same."""
    async with watching(address) as watcher:
        async with publishing(address, kind=Publisher) as publisher:
            await publisher.store(1)
            await publisher.store(2)
            await watcher.holds(1, 2)
            kept, number = publisher.kept, publisher.next
        async with publishing(address, kind=Publisher) as publisher:
            publisher.kept, publisher.next = kept, number
            await publisher.store(3, lost=True)
            await watcher.holds(1, 2, 3)
            assert watcher.counts() == {}
            assert watcher.clears == 0


async def test_malformed_messages_clear_and_do_not_end_it(address: PublisherAddress) -> None:
    async with publishing(address, kind=Publisher) as publisher, watching(address) as watcher:
        await publisher.store(1)
        await watcher.holds(1)
        await publisher.events.send_multipart([b"kv"])
        await publisher.events.send_multipart([b"kv", b"short", b"payload"])
        await publisher.send_raw(b"\xc1")
        await until(lambda: not watcher.held)
        await publisher.store(2)
        await watcher.holds(2)
        assert watcher.counts() == {Omission.MALFORMED: 3}


@pytest.mark.parametrize("grows", [False, True])
async def test_a_replay_that_never_ends_is_left(
    address: PublisherAddress, monkeypatch: pytest.MonkeyPatch, *, grows: bool
) -> None:
    """One that tells the same message for ever, or as many as one likes."""
    monkeypatch.setattr(subscriber, "_REPLAYS_S", 0.3)

    async def babble(publisher: Publisher) -> None:
        with publisher.context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(publisher.address.replay_endpoint)
            client, _, _ = await router.recv_multipart()
            for count in range(1 << 40):
                number = (count if grows else 0).to_bytes(8, "big")
                payload = msgspec.msgpack.encode([0, [stored(500 + count % 2)], 0])
                await router.send_multipart([client, b"", b"kv", number, payload])
                await asyncio.sleep(0.001)

    monkeypatch.setattr(Publisher, "serve_replays", babble)
    async with publishing(address, kind=Publisher) as publisher, watching(address) as watcher:
        await until(lambda: watcher.subscriber.batches > 0)
        await asyncio.sleep(0.5)
        publisher.next = 1 << 20
        await publisher.store(1)
        await watcher.holds(1)


async def test_a_message_that_is_too_long_is_lost_and_does_not_end_it(
    address: PublisherAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "MESSAGE_BYTES_MAX", 4096)
    monkeypatch.setattr(subscriber, "_REPLAY_S", 0.2)
    async with publishing(address, keep=1, kind=Publisher) as publisher, watching(address) as watcher:
        await publisher.store(1)
        await watcher.holds(1)
        await publisher.send_raw(b"\x90" * 5000)
        await until(lambda: not watcher.held)
        for root in range(2, 100):
            await publisher.store(root)
            await asyncio.sleep(0.02)
        await until(lambda: name(99) in watcher.held)


def pushed(flood: Any, number: int) -> bool:
    """Send a MiB, unless there is no room on the way."""
    try:
        flood.send_multipart([b"kv", number.to_bytes(8, "big"), bytes(1 << 20)])
    except zmq.Again:
        return False
    return True


async def test_a_flood_waits_at_the_publisher(address: PublisherAddress) -> None:
    """Of messages that nobody here takes yet, few are in this process."""
    where = without_replay(address)
    with zmq.Context() as context, context.socket(zmq.XPUB) as flood:
        flood.linger, flood.sndhwm = 0, 1
        flood.setsockopt(zmq.XPUB_NODROP, 1)
        flood.bind(where.endpoint)
        async with watching(where) as watcher:
            subscribed = await asyncio.to_thread(flood.poll, 30_000)
            assert subscribed, "what is sent before is lost"
            sent = 0
            while not watcher.subscriber.batches:
                await asyncio.sleep(0.01)
                flood.send_multipart([b"kv", sent.to_bytes(8, "big"), b"\x92\x00\x90"])
                sent += 1
            flood.sndtimeo = 500
            numbers = range(sent, sent + 64)  # the event loop has no turn, so nothing is taken
            queued = sum(1 for _ in takewhile(lambda number: pushed(flood, number), numbers))
            assert 0 < queued < len(numbers)
            await until(lambda: watcher.subscriber.batches >= sent + queued)


@pytest.mark.parametrize("wait", [False, True])
async def test_others_have_turns_while_a_large_message_is_read(
    address: PublisherAddress, *, wait: bool
) -> None:
    """Others see part of it known."""
    async with publishing(address, kind=Publisher) as publisher, watching(address) as watcher:
        await publisher.store(0)
        await watcher.holds(0)
        sizes: set[int] = set()

        async def look() -> None:
            while len(watcher.held) < 3001:
                sizes.add(len(watcher.held))
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(look())
            await publisher.store(*range(1, 3001), lost=wait)
            if wait:
                await publisher.store(3001)
        assert len(sizes) > 5
        assert watcher.counts() == {}


def test_ranks_have_ports_of_their_own() -> None:
    address = PublisherAddress(endpoint="tcp://host:5557", replay_endpoint="ipc:///run/x", topic="t")
    assert address.of_rank(0) == address
    assert address.of_rank(2) == PublisherAddress(
        endpoint="tcp://host:5559", replay_endpoint="ipc:///run/x_dp2", topic="t"
    )


@pytest.mark.parametrize(
    "endpoint", ["", "5557", "tcp://", "tcp://host", "tcp://host:x", "http://host:1", "ipc://", "tcp://h:0"]
)
def test_addresses_are_checked(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"KV events: .*expected tcp://HOST:PORT or ipc://PATH"):
        KvEventSubscriber(
            PublisherAddress(endpoint=endpoint), block_size=SIZE, salt_of=HexSalts(), publish=lambda _: None
        )


FORGED_SIZE = 4
MESSAGES = 10_000
NUMBER_MAX = (1 << 64) - 1
TOKENS = list(range(2 * FORGED_SIZE))
MAP: dict[str, Any] = {
    "type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": None, "token_ids": TOKENS, "block_size": FORGED_SIZE,
    "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["00ff", ["ab12", 2]], None], "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}  # fmt: skip
SOUND = [
    [MAP, {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"}],
    [MAP | {"block_hashes": [13, -14], "parent_block_hash": 12, "extra_keys": None, "medium": "CPU"}],
    [
        ["BlockStored", [b"x" * 32, 15], None, TOKENS, FORGED_SIZE, None, "STORAGE"],
        ["BlockRemoved", [15], "STORAGE"],
    ],
    [{"type": "AllBlocksCleared"}, MAP | {"token_ids": [], "block_hashes": [11]}],
]


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

    held = Watcher(address, FORGED_SIZE)
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
        while subscriber.num_blocks != 2 or len(held.held) != 2:
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

    held = Watcher(address, FORGED_SIZE)
    following = asyncio.ensure_future(held.subscriber.run())
    port = int(address.endpoint.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener:
        answering = asyncio.to_thread(answer, listener)
        asyncio.get_running_loop().call_later(0.8, stopping.set)
        await answering
    async with publishing(address) as publisher:
        for _ in range(2):
            while len(held.held) != 2:
                await publisher.send({"type": "AllBlocksCleared"}, MAP | {"extra_keys": None})
                await asyncio.sleep(0.02)
            held.held.clear()
    assert not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
