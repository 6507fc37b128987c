"""A host's end of its connection to the planner: tells what it sees, and obeys."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from penstock.core.errors import PenstockError, ProtocolError, RequestError, Unavailable
from penstock.core.log import get_logger
from penstock.core.net.address import Address
from penstock.core.net.channel import FrameChannel
from penstock.core.net.handshake import Challenge
from penstock.core.net.listening import dial
from penstock.core.types.scaling import Scale
from penstock.deploy.control.messages import Add, Flip, Retire
from penstock.deploy.hosts.host import Host
from penstock.deploy.hosts.messages import (
    CODEC,
    FRAME_BYTES_MAX,
    HEARTBEAT_S,
    SILENT_S,
    Done,
    Message,
    Order,
    RoundTold,
    Seen,
    State,
    Taken,
)
from penstock.deploy.messages import Planned
from penstock.runtime import handshake
from penstock.runtime.observations.windows import Window
from penstock.runtime.tls import PlaneTls

_STATE_S = 1.0
_PAUSE_S = 0.05
_CONNECT_S = 10.0
_CLOSE_S = 0.5
_RETRY_S, _RETRY_S_MAX = 0.2, 5.0
_STATES_KEPT = 512
"""More than are sent in `SILENT_S`."""
_log = get_logger()


class HostLink:
    """Connects to the planner when entered, and again by itself. One event loop owns it.

    While the planner is away the host's workers stay as they are.
    """

    def __init__(
        self,
        address: str,
        identity: handshake.Identity,
        *,
        name: str,
        host: Host,
        frontends: Callable[[], tuple[str, ...]],
        tell: Callable[[Planned], None],
        rng: random.Random,
        tls: PlaneTls | None = None,
    ) -> None:
        """Make it; entering the context connects.

        Args:
            address: where the planner listens.
            identity: has the deployment's secret.
            name: of this host.
            host: its workers.
            frontends: names those of this host that are ready.
            tell: called with the planner's rounds, where this host has a frontend.
            rng: for jitter.
            tls: certificates; None for no TLS.
        """
        self._address = Address.parse(address, source="planner.address")
        self._identity = identity
        self._name = name
        self._host = host
        self._frontends = frontends
        self._tell = tell
        self._rng = rng
        self._tls = tls
        self._session: _Session | None = None
        self._tasks = asyncio.TaskGroup()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._keeper = self._tasks.create_task(self._keep_connected(), name="planner connection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None, "entered"
        if (session := self._session) is not None:
            await session.close()
        self._keeper.cancel()
        await self._tasks.__aexit__(None, None, None)

    def window(self, source: str, window: Window) -> None:
        """Send a window of one of this host's processes; without a connection it is lost."""
        if self._session is not None and self._session.channel.writable:
            self._session.channel.send(Seen(source=source, window=window))

    async def _keep_connected(self) -> None:
        pause_s, said = _RETRY_S, ""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    session = _Session(self._identity, self._host, group, self._tell)
                    await self._connect(session)
                    said, pause_s = "", _RETRY_S
                    _log.info("planner_connected", address=str(self._address))
                    self._session = session
                    report = group.create_task(session.report(self._frontends), name="host state")
                    await session.channel.closed.wait()
                    report.cancel()
                    session.end()
                    _log.warning(
                        "planner_lost", address=str(self._address), effect="workers stay as they are"
                    )
            except* (OSError, TimeoutError, PenstockError) as errors:
                error = errors.exceptions[0]
                reason = str(error) or f"no answer within {_CONNECT_S:g} s"
                if reason != said:
                    _log.warning("planner_unreachable", address=str(self._address), error=reason)
                    said = reason
            finally:
                self._session = None
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _RETRY_S_MAX)

    async def _connect(self, session: "_Session") -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                await dial(
                    lambda: session.channel, self._address, tls=self._tls.client if self._tls else None
                )
                await session.trusted
                session.send_state(await self._host.scale(), self._frontends(), self._name)
                await session.taken
        except BaseException:
            session.channel.abort("not needed any more")
            raise


class _Session:
    """One connection to the planner."""

    def __init__(
        self,
        identity: handshake.Identity,
        host: Host,
        group: asyncio.TaskGroup,
        tell: Callable[[Planned], None],
    ) -> None:
        self.channel: FrameChannel[Message] = FrameChannel(
            CODEC,
            self,
            frame_bytes_max=FRAME_BYTES_MAX,
            write_buffer_bytes=64 << 10,
            write_bytes_max=FRAME_BYTES_MAX,
            heartbeat_interval_s=HEARTBEAT_S,
            heartbeat_timeout_s=SILENT_S,
        )
        loop = asyncio.get_running_loop()
        self.trusted: asyncio.Future[None] = loop.create_future()
        self.taken: asyncio.Future[None] = loop.create_future()
        self._identity = identity
        self._host = host
        self._group = group
        self._tell = tell
        self._hello: tuple[Challenge, handshake.Hello] | None = None
        self._sent: deque[tuple[int, float]] = deque(maxlen=_STATES_KEPT)
        """Number and time of the last states."""
        self._orders: set[asyncio.Task[None]] = set()

    async def report(self, frontends: Callable[[], tuple[str, ...]]) -> None:
        """Send the host's state at each change, and once a second, until cancelled."""
        while True:
            scale = await self._host.scale()
            self.send_state(scale, frontends())
            await asyncio.sleep(_PAUSE_S)
            try:
                async with asyncio.timeout(_STATE_S):
                    await self._host.scale(scale.sequence)
            except TimeoutError:
                pass

    def send_state(self, scale: Scale, frontends: tuple[str, ...], name: str = "") -> None:
        number = self._sent[-1][0] + 1 if self._sent else 1
        self._sent.append((number, asyncio.get_running_loop().time()))
        if self.channel.writable:
            self.channel.send(State(number=number, scale=scale, frontends=frontends, host=name))

    async def close(self) -> None:
        self.channel.close("the host's supervisor ends")
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.channel.closed.wait()
        except TimeoutError:
            self.channel.abort("the planner did not take what was buffered")

    def end(self) -> None:
        """Give up what the planner waits for no longer; what was accepted goes on."""
        for order in self._orders:
            order.cancel()

    def channel_opened(self) -> None:
        pass

    def message_received(self, message: Message) -> None:
        match message:
            case Challenge():
                self._hello = (message, handshake.hello(self._identity, message))
                self.channel.send(self._hello[1])
            case handshake.HelloReply():
                self._on_reply(message)
            case Taken(error=error):
                self._on_taken(
                    None if error is None else ProtocolError(f"the planner refused: {error.message}")
                )
            case Order():
                self._check_trusted(message)
                order = self._group.create_task(self._obey(message), name="order")
                self._orders.add(order)
                order.add_done_callback(self._orders.discard)
            case RoundTold(planned=planned):
                self._check_trusted(message)
                self._tell(planned)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a planner does not send this; update the older side"
                )

    def unknown_received(self, tag: str) -> None:
        """Ignore it: a message of a newer planner."""

    def channel_writable(self) -> None:
        pass

    def channel_closed(self, reason: str) -> None:
        for future in (self.trusted, self.taken):
            if not future.done():
                future.set_exception(Unavailable(f"the connection ended: {reason}"))
                future.exception()  # nobody may wait for it

    def _check_trusted(self, message: Message) -> None:
        if not self.taken.done():
            raise ProtocolError(f"{type(message).__name__}: before the handshake; the peer is no planner")

    def _on_reply(self, reply: handshake.HelloReply) -> None:
        if self._hello is None or self.trusted.done():
            raise ProtocolError("hello reply: not asked for; the peer is no planner")
        if reply.error is not None:
            raise ProtocolError(f"the planner refused us: {reply.error.message}")
        handshake.check_reply(self._identity, *self._hello, reply)
        self.trusted.set_result(None)

    def _on_taken(self, error: ProtocolError | None) -> None:
        if not self.trusted.done() or self.taken.done():
            raise ProtocolError("taken: before the handshake, or twice; the peer is no planner")
        if error is None:
            self.taken.set_result(None)
        else:
            self.taken.set_exception(error)

    async def _obey(self, order: Order) -> None:
        names: tuple[str, ...] = ()
        error = None
        try:
            self._check_fresh(order)
            names = await self._change(order)
        except PenstockError as refused:
            error = refused.to_info()
        except Exception as failed:  # noqa: BLE001 - the planner learns of it, and the host serves on
            _log.error("order_failed", error=repr(failed))
            error = PenstockError(f"the supervisor failed at this order: {failed!r}").to_info()
        scale = await self._host.scale()
        if self.channel.is_open:
            self.channel.send(Done(number=order.number, scale=scale, names=names, error=error))

    def _check_fresh(self, order: Order) -> None:
        """Refuse an order on what this host told too long ago: it lay in a buffer while one of the two did not run."""
        now_s = asyncio.get_running_loop().time()
        at_s = next((at_s for number, at_s in self._sent if number == order.state), None)
        if at_s is None or now_s - at_s > SILENT_S:
            raise RequestError(
                f"an order on what the host told {'earlier' if at_s is None else f'{now_s - at_s:.0f} s ago'}; look again and repeat",
                http_status=409,
            )

    async def _change(self, order: Order) -> tuple[str, ...]:
        elsewhere = frozenset(order.elsewhere)
        match order.change:
            case Add(role=role, count=count, by=by, revision=revision):
                return await self._host.add(role, count, by=by, revision=revision)
            case Retire(names=names, by=by, revision=revision):
                await self._host.retire(names, by=by, revision=revision, elsewhere=elsewhere)
            case Flip(name=name, role=role, by=by, revision=revision):
                await self._host.flip(name, role, by=by, revision=revision, elsewhere=elsewhere)
        return ()
