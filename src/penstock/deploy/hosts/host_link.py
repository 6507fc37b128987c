"""A host's end of its connection to the planner: tells what it sees, and obeys."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from penstock.core.errors import PenstockError, ProtocolError, RequestError
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.core.types.instances import Scale
from penstock.deploy.control.messages import Add, Flip, Retire
from penstock.deploy.hosts.connector import Host
from penstock.deploy.hosts.messages import (
    PROTOCOL,
    SILENT_S,
    HostAdmitted,
    HostRound,
    HostState,
    HostWindow,
    Message,
    Order,
    OrderDone,
)
from penstock.deploy.messages import RoundCounts
from penstock.runtime.handshake import Identity
from penstock.runtime.observations import Window
from penstock.runtime.session import ClientSession
from penstock.runtime.tls import PlaneTls

_STATE_S = 1.0
_PAUSE_S = 0.05
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
        identity: Identity,
        *,
        name: str,
        host: Host,
        frontends: Callable[[], tuple[str, ...]],
        tell: Callable[[RoundCounts], None],
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
        self.identity = identity
        self.name = name
        self.host = host
        self.frontends = frontends
        self.tell = tell
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
            await session.close_gracefully("the host's supervisor ends", _CLOSE_S)
        self._keeper.cancel()
        await self._tasks.__aexit__(None, None, None)

    def window(self, source: str, window: Window) -> None:
        """Send a window of one of this host's processes; without a connection it is lost."""
        if self._session is not None and self._session.channel.writable:
            self._session.channel.send(HostWindow(source=source, window=window))

    async def _keep_connected(self) -> None:
        pause_s, said = _RETRY_S, ""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    session = _Session(self, group)
                    await session.connect(self._address, self._tls)
                    said, pause_s = "", _RETRY_S
                    _log.info("planner_connected", address=str(self._address))
                    self._session = session
                    report = group.create_task(session.report(), name="host state")
                    await session.channel.closed.wait()
                    report.cancel()
                    session.end()
                    _log.warning(
                        "planner_lost", address=str(self._address), effect="workers stay as they are"
                    )
            except* (OSError, TimeoutError, PenstockError) as errors:
                error = errors.exceptions[0]
                reason = str(error) or f"no answer within {PROTOCOL.connect_timeout_s:g} s"
                if reason != said:
                    _log.warning("planner_unreachable", address=str(self._address), error=reason)
                    said = reason
            finally:
                self._session = None
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _RETRY_S_MAX)


class _Session(ClientSession[Message]):
    """One connection to the planner."""

    def __init__(self, link: HostLink, group: asyncio.TaskGroup) -> None:
        super().__init__(PROTOCOL, link.identity)
        self._link = link
        self._host = link.host
        self._group = group
        self._taken = self.awaited()
        self._sent: deque[tuple[int, float]] = deque(maxlen=_STATES_KEPT)
        """Number and time of the last states."""
        self._orders: set[asyncio.Task[None]] = set()

    async def enter(self) -> None:
        self._send_state(await self._host.scale(), self._link.name)
        await self._taken

    async def report(self) -> None:
        """Send the host's state at each change, and once a second, until cancelled."""
        while True:
            scale = await self._host.scale()
            self._send_state(scale)
            await asyncio.sleep(_PAUSE_S)
            try:
                async with asyncio.timeout(_STATE_S):
                    await self._host.scale(scale.sequence)
            except TimeoutError:
                pass

    def end(self) -> None:
        """Give up what the planner waits for no longer; what was accepted goes on."""
        for order in self._orders:
            order.cancel()

    def received(self, message: Message) -> None:
        match message:
            case HostAdmitted(error=error) if not self._taken.done():
                if error is None:
                    self._taken.set_result(None)
                else:
                    self.fail(ProtocolError(f"the planner refused: {error.message}"))
            case Order() if self._taken.done():
                order = self._group.create_task(self._obey(message), name="order")
                self._orders.add(order)
                order.add_done_callback(self._orders.discard)
            case HostRound(planned=planned) if self._taken.done():
                self._link.tell(planned)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a planner does not send this now; update the older side"
                )

    def _send_state(self, scale: Scale, name: str = "") -> None:
        number = self._sent[-1][0] + 1 if self._sent else 1
        self._sent.append((number, asyncio.get_running_loop().time()))
        if self.channel.writable:
            self.channel.send(
                HostState(number=number, scale=scale, frontends=self._link.frontends(), host=name)
            )

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
            self.channel.send(OrderDone(number=order.number, scale=scale, names=names, error=error))

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
