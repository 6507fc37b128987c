"""Follows the KV events that an engine publishes over ZeroMQ, and replays what was missed.

An engine numbers its messages from 0 on a PUB socket, which drops messages rather than wait: `[topic, number, payload]`. A ROUTER
socket, if the engine has one, sends again what it still keeps. Where events are lost for good, all blocks are forgotten: routers
then know less than the engine has, and never more.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from penstock.core.errors import ConfigError, ProtocolError
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.listening import PROBE_S, PROBES
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.engine.kv_events.decoder import EventDecoder
from penstock.engine.kv_events.events import Omission, Omissions
from penstock.engine.kv_events.translator import KvEventTranslator, SaltOf

_TOLD = (
    Omission.UNKNOWN_TYPE, Omission.MEDIUM, Omission.UNKNOWN_PARENT, Omission.CONTRADICTION, Omission.FULL,
)  # fmt: skip
"""Omissions to warn about: routers know fewer blocks than the engine has."""
_log = get_logger()


class EventReader:
    """Decodes and translates the messages of one engine, and warns of parts that it leaves out. One task owns it."""

    def __init__(
        self, endpoint: str, *, block_size: int, salt_of: SaltOf, hash_key: bytes = DEFAULT_KEY
    ) -> None:
        """Make a reader.

        Args:
            endpoint: where the messages come from, for the log.
            block_size: tokens in a block.
            salt_of: finds a prompt's salt, such as `HexSalts`.
            hash_key: the deployment's.
        """
        self.omissions: Omissions = Omissions()
        self._endpoint = endpoint
        self._decoder = EventDecoder(block_size, self.omissions)
        self._translator = KvEventTranslator(
            block_size=block_size, salt_of=salt_of, omissions=self.omissions, hash_key=hash_key
        )
        self._warn_at = 1
        """Warn at so many omissions: the first, then each ten times as many."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the engine is known to hold."""
        return len(self._translator)

    def read(self, payload: bytes) -> Iterator[list[KvEvent]]:
        """Read a message, a part at a time; one that is malformed clears all blocks, since it may have told of removals."""
        try:
            for events in self._decoder.decode(payload):
                yield self._translator.translate(events)
        except ProtocolError as error:
            self.malformed(error.message)
            yield self.clear()
        told = {str(why): count for why in _TOLD if (count := self.omissions[why])}
        if told and (total := sum(told.values())) >= self._warn_at:
            self._warn_at = 10 * total
            _log.warning("kv_events_left_out", endpoint=self._endpoint, **told)

    def clear(self) -> list[KvEvent]:
        """Forget all blocks, after events were lost."""
        return self._translator.clear()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._translator.check()

    def malformed(self, reason: str) -> None:
        """Count and log a message that cannot be read."""
        if self.noted(Omission.MALFORMED):
            _log.warning("kv_event_message_malformed", endpoint=self._endpoint, reason=reason)

    def noted(self, why: Omission) -> bool:
        """Count one, and say whether to log it: the first ten, then the 100th, the 1000th and so on."""
        self.omissions[why] += 1
        count = self.omissions[why]
        return count <= 10 or str(count).rstrip("0") == "1"


MESSAGE_BYTES_MAX = 1 << 23
"""One step that stores a prompt of a million tokens sends less."""
_QUEUED_MESSAGES_MAX = 16
"""Messages that wait here in a socket, 128 MiB at most; further ones wait at the publisher, which drops some in the end: a gap."""
_RECONNECT_S = 0.1
_ABSENT_S = 10.0
"""Log a warning if nobody publishes for so long after the start."""
_REPLAY_S = 5.0
"""A replay has failed if its first message does not come within this time."""
_REPLAY_PAUSE_S = 0.5
"""The same for later messages of a replay: the publisher dropped the rest, as ROUTER sockets do, and is asked again."""
_REPLAYS_S = 60.0
"""Time limit of all replays for one gap, since a replay may never end."""
_MESSAGES_AT_ONCE = 64
"""Messages handled before other tasks of the event loop run."""
_END = b"\xff" * 8
_NUMBER_BYTES = 8
_PORTS = 1 << 16

Publish = Callable[[Sequence[KvEvent]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherAddress:
    """Where one engine publishes.

    Attributes:
        endpoint: `tcp://HOST:PORT` or `ipc://PATH`; with `*` as host, bound here, for engines that connect.
        replay_endpoint: the same of the ROUTER socket; None: the engine has none.
        topic: the messages' topic begins with it.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    def of_rank(self, rank: int) -> "PublisherAddress":
        """Give the address of a data-parallel rank: engines add the rank to ports."""
        replay = self.replay_endpoint
        return PublisherAddress(
            endpoint=_of_rank(self.endpoint, rank),
            replay_endpoint=None if replay is None else _of_rank(replay, rank),
            topic=self.topic,
        )

    def check(self) -> None:
        """Raise ConfigError where it is no address that can be used."""
        given = (self.endpoint,) if self.replay_endpoint is None else (self.endpoint, self.replay_endpoint)
        for endpoint in given:
            kind, _, rest = endpoint.partition("://")
            port = rest.rpartition(":")[2]
            if kind in {"ipc", "inproc"} and rest:
                continue
            if kind == "tcp" and ":" in rest and port.isdecimal() and 0 < int(port) < _PORTS:
                continue
            raise ConfigError(f"KV events: {endpoint!r}: expected tcp://HOST:PORT or ipc://PATH")


def require_zmq() -> None:
    """Raise ConfigError where pyzmq is missing."""
    if find_spec("zmq") is None:
        raise ConfigError("KV events: pyzmq is not installed; run `pip install penstock-llm[events]`")


class KvEventSubscriber:
    """Gives one engine's KV events, or one data-parallel rank's, to a function. One task owns it."""

    def __init__(
        self,
        address: PublisherAddress,
        *,
        block_size: int,
        salt_of: SaltOf,
        publish: Publish,
        hash_key: bytes = DEFAULT_KEY,
    ) -> None:
        """Make a subscriber; `run` connects.

        Args:
            address: of the publisher.
            block_size: tokens in a block.
            salt_of: finds a prompt's salt, such as `HexSalts`.
            publish: called with events in order, in the event loop of `run`.
            hash_key: the deployment's.

        Raises:
            ConfigError: the address is wrong, or pyzmq is missing.
        """
        address.check()
        require_zmq()
        self.batches = 0
        """Messages applied."""
        self._address = address
        self._publish = publish
        self._reader = EventReader(
            address.endpoint, block_size=block_size, salt_of=salt_of, hash_key=hash_key
        )
        self._synced = False
        self._next: int | None = None
        """Number of the next message; None: unknown, any number is right."""
        self._latest = b""
        """Payload of the message before."""
        self._live = -1
        """Number of the latest message that came without a replay."""
        self._absence: asyncio.TimerHandle | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that the engine is known to hold."""
        return self._reader.num_blocks

    @property
    def omissions(self) -> Omissions:
        """Counts of the event parts that were left out, by reason."""
        return self._reader.omissions

    async def run(self) -> None:
        """Follow the engine until cancelled. It may start later, end and come again.

        Raises:
            ConfigError: the address cannot be used on this machine.
        """
        zmq_asyncio = import_module("zmq.asyncio")

        with zmq_asyncio.Context() as context:
            self._absence = asyncio.get_running_loop().call_later(_ABSENT_S, self._absent)
            try:
                while True:
                    await self._follow(context, zmq_asyncio.Poller())
                    await asyncio.sleep(_RECONNECT_S)
            finally:
                self._absence.cancel()

    async def _follow(self, context: Any, poller: Any) -> None:
        """Follow over one socket, until its connection is lost; a bound one has many and stays.

        Each connection has a socket of its own. ZeroMQ gives an address up after a message that is too long or no ZMTP, and a
        `disconnect` while a message waits in the socket ends the whole process (libzmq 4.3.5, `fq.cpp: !_more`).
        """
        zmq = _zmq()

        with context.socket(zmq.SUB) as messages:
            messages.linger = 0
            messages.rcvhwm = _QUEUED_MESSAGES_MAX
            messages.maxmsgsize = MESSAGE_BYTES_MAX
            for option, value in _keepalive().items():
                messages.setsockopt(option, value)
            messages.subscribe(self._address.topic.encode())
            changes = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            with messages.get_monitor_socket(changes | failures) as monitor:
                poller.register(monitor, zmq.POLLIN)
                poller.register(messages, zmq.POLLIN)
                messages.ipv6 = "[" in self._address.endpoint
                _open(messages, self._address.endpoint)
                try:
                    while True:
                        ready = dict(await poller.poll())
                        if monitor in ready:
                            if not await self._is_connected(await monitor.recv_multipart(), context):
                                return
                        elif messages in ready:
                            await self._receive(messages, context)
                finally:
                    messages.disable_monitor()

    async def _is_connected(self, frames: Sequence[bytes], context: Any) -> bool:
        """Note a change of the connection; False where another socket is needed."""
        if int.from_bytes(frames[0][:2], "little") == _zmq().EVENT_HANDSHAKE_SUCCEEDED:
            if self._absence is not None:
                self._absence.cancel()
            await self._sync(context)
            return True
        self._synced = False
        return _is_bound(self._address.endpoint)

    async def _receive(self, messages: Any, context: Any) -> None:
        """Take the messages that are there, up to a number."""
        zmq = _zmq()

        for _ in range(_MESSAGES_AT_ONCE):
            try:
                frames = await messages.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _message(frames)
            if message is None:
                self._reader.malformed(f"{len(frames)} frames, expected topic, number of 8 bytes and payload")
            else:
                await self._take(*message, context)
        await asyncio.sleep(0)

    async def _take(self, number: int, payload: bytes, context: Any) -> None:
        """Apply a message, after a replay of messages missed before it."""
        if not self._synced:
            await self._sync(context)
        elif self._next is not None and number <= self._live:
            self._restarted()
            await self._sync(context)
        elif self._next is not None and number > self._next and not await self._replay(context):
            self._lost(number)
        self._live = number
        if self._next is None or number == self._next:
            await self._apply(number, payload)
        elif number > self._next:
            self._lost(number)
            await self._apply(number, payload)

    async def _sync(self, context: Any) -> None:
        """Begin, or go on after the connection was lost: the publisher may be another one now."""
        self._synced = True
        self._live = -1
        if not await self._replay(context):
            if self._next is not None:
                self._lost(None)
            self._next = None

    async def _replay(self, context: Any) -> bool:
        """Apply the messages after the latest one, as far as the publisher keeps them.

        Returns:
            True: all messages up to now were applied. False: the publisher has no replay, or the replay failed.
        """
        if self._address.replay_endpoint is None:
            return False
        try:
            async with asyncio.timeout(_REPLAYS_S):
                while True:  # a replay may have gaps of its own
                    before = self._next
                    if await self._replay_once(context):
                        return True
                    if self._next == before:
                        return False
        except TimeoutError:
            _log.warning(
                "kv_events_replay_endless", endpoint=self._address.replay_endpoint, seconds=_REPLAYS_S
            )
        return False

    async def _replay_once(self, context: Any) -> bool:
        """Ask for the latest message once more, to see that the publisher is still the same, and for those after it.

        Returns:
            False where the replay broke off, or has to begin anew from another number.
        """
        known = self._next or 0
        start = max(known - 1, 0)
        is_same = not known
        async with aclosing(self._replayed(context, start)) as replayed:
            async for message in replayed:
                if message is None:  # the end
                    if not is_same:
                        self._restarted()
                    return is_same
                number, payload = message
                if not is_same:
                    is_same = True
                    if number == start and payload != self._latest:
                        self._restarted()
                        return False
                    if number == start:
                        continue
                if self._next is None or (number > self._next and self._next == known):
                    if number:
                        self._lost(number)
                    self._next = number
                if number > self._next:
                    return False
                if number == self._next:
                    await self._apply(number, payload)
        return False

    async def _replayed(self, context: Any, start: int) -> AsyncGenerator[tuple[int, bytes] | None]:
        """Yield (number, payload) from `start` on, and None at the end; stop early where nothing comes."""
        zmq = _zmq()

        with context.socket(zmq.DEALER) as replay:
            replay.linger = 0
            replay.rcvhwm = _QUEUED_MESSAGES_MAX
            replay.maxmsgsize = MESSAGE_BYTES_MAX
            replay.ipv6 = "[" in (self._address.replay_endpoint or "")
            replay.connect(self._address.replay_endpoint)
            await replay.send_multipart([b"", start.to_bytes(_NUMBER_BYTES, "big")])
            taken = 0
            while True:
                try:
                    async with asyncio.timeout(_REPLAY_PAUSE_S if taken else _REPLAY_S):
                        frames = await replay.recv_multipart()
                except TimeoutError:
                    if not taken:
                        _log.warning(
                            "kv_events_replay_silent",
                            endpoint=self._address.replay_endpoint,
                            seconds=_REPLAY_S,
                        )
                    return
                if len(frames) >= 2 and frames[-2] == _END:
                    yield None
                    return
                message = _message(frames)
                if message is None:
                    self._reader.malformed(f"{len(frames)} frames of a replay, expected number and payload")
                    return
                yield message
                taken += 1
                if taken % _MESSAGES_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _apply(self, number: int, payload: bytes) -> None:
        self._next, self._latest = number + 1, payload
        self.batches += 1
        for index, events in enumerate(self._reader.read(payload)):
            if index:
                await asyncio.sleep(0)
            self._tell(events)

    def _tell(self, events: Sequence[KvEvent]) -> None:
        if events:
            self._publish(events)

    def _absent(self) -> None:
        _log.warning("kv_events_nobody_publishes", endpoint=self._address.endpoint, seconds=_ABSENT_S)

    def _lost(self, number: int | None) -> None:
        """Forget all blocks, since events up to `number` are lost."""
        if self._next and self._reader.noted(Omission.LOST):  # at the start nothing was known
            _log.warning("kv_events_lost", endpoint=self._address.endpoint, expected=self._next, got=number)
        self._clear()
        self._next = number

    def _restarted(self) -> None:
        """Forget all blocks: another engine publishes here now."""
        if self._reader.noted(Omission.RESTART):
            _log.info("kv_events_restarted", endpoint=self._address.endpoint)
        self._clear()
        self._next, self._live = 0, -1

    def _clear(self) -> None:
        self._tell(self._reader.clear())


def _zmq() -> Any:
    return import_module("zmq")  # an optional package


def _keepalive() -> dict[int, int]:
    """Give the options by which a TCP connection fails where the publisher's host no longer answers: a silent one may also have no news."""
    zmq = _zmq()

    return {
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: PROBE_S,
        zmq.TCP_KEEPALIVE_INTVL: PROBE_S,
        zmq.TCP_KEEPALIVE_CNT: PROBES,
        zmq.TCP_MAXRT: PROBES * PROBE_S * 1000,
    }


def _open(messages: Any, endpoint: str) -> None:
    zmq = _zmq()

    try:
        if _is_bound(endpoint):
            messages.bind(endpoint)
        else:
            messages.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"KV events: {endpoint}: {error}") from None


def _is_bound(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return endpoint.startswith("tcp://") and host in {"*", "::", "[::]"}


def _message(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Read (number, payload), which come last; None if frames are missing."""
    if len(frames) < 3 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


def _of_rank(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"
