"""Whether a worker takes requests, in which role, and what discovery says of that."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from penstock.core.errors import Overloaded, PenstockError, RequestError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceState, Role
from penstock.seams import Discovery, Registration
from penstock.worker.config import WorkerConfig
from penstock.worker.engine_driver import EngineDriver
from penstock.worker.frontends import Frontends

_TELL_AGAIN_S = 1.0
"""So long after a registry could not be reached it is told again of a worker that is back."""

_log = get_logger()


class WorkerRegistration:
    """One worker's entry in discovery: registered, changed, draining, withdrawn. One event loop owns it."""

    def __init__(
        self,
        instance: Instance,
        config: WorkerConfig,
        frontends: Frontends,
        driver: EngineDriver,
        end_all: Callable[[PenstockError], None],
    ) -> None:
        """Say nothing yet.

        Args:
            instance: what the worker is at first.
            config: how long draining may take.
            frontends: those with requests here.
            driver: runs these requests on the engine.
            end_all: ends every request with an error that has its frontend go on elsewhere.
        """
        self.instance = instance
        self.refusal: PenstockError | None = None
        """Why it takes no requests; None while it does."""
        self._config = config
        self._frontends = frontends
        self._driver = driver
        self._end_all = end_all
        self._registration: Registration | None = None
        self._changing_to: Role | None = None

    async def register(self, discovery: Discovery) -> None:
        """Be found.

        Raises:
            Unavailable: the registry cannot be reached.
        """
        self._registration = await discovery.register(self.instance)
        _log.info("worker_registered", worker=self.instance.name, address=self.instance.address)

    async def withdraw(self) -> None:
        """Be found no more. Safe twice."""
        if self._registration is not None:
            await self._registration.close()

    async def leave(self) -> None:
        """Take nothing new, wait until nobody needs this worker, hand the rest to other workers."""
        try:
            await self._say_draining()
        except Unavailable as error:
            _log.warning("drain_not_announced", worker=self._name, error=error.message)
        await self._drain(self._nobody_needs_it, "stops")
        _log.info("worker_drained", worker=self._name)

    async def change(self, role: Role) -> None:
        """Drain as in `leave`, and come back in another role; what is loaded stays loaded, and what is offered can be had.

        Raises:
            RequestError: it cannot become one (409).
            WorkerLost: its engine died meanwhile.
            Unavailable: the registry cannot be reached, so that nobody would know.
        """
        self.check_change(role)
        self._changing_to = role
        try:
            await self._driver.prepare(role)
            try:
                await self._say_draining()
                refusal = await self._drain(self._frontends.idle.wait, f"becomes {role}")
            except BaseException:
                self.instance = msgspec.structs.replace(self.instance, state=InstanceState.READY)
                raise
            if self.refusal is not None and self.refusal is not refusal:
                raise self.refusal
            before = self.instance.role
            self.instance = msgspec.structs.replace(
                self.instance,
                role=role,
                state=InstanceState.READY,
                engine=self._driver.assume(role, self.instance.engine),
                exchange=self._driver.exchange,
            )
            self.refusal = None
            await self._say_ready()
            _log.info("role_changed", worker=self._name, role=role, before=before)
        finally:
            self._changing_to = None

    def check_change(self, role: Role) -> None:
        """Refuse a change that cannot be, or not now.

        Raises:
            RequestError: why (409).
        """
        if self._changing_to is not None:
            raise _conflict(f"{self._name} is becoming {self._changing_to} already; wait until it has")
        if self.instance.state is not InstanceState.READY or self.refusal is not None:
            why = "it is draining" if self.refusal is None else self.refusal.message
            raise _conflict(f"{self._name} does not change its role any more: {why}; choose another worker")
        if role is self.instance.role:
            raise _conflict(f"{self._name} is {role} already; choose another role")

    @property
    def _name(self) -> str:
        return f"worker {self.instance.name}"

    async def _say_draining(self) -> None:
        """Have routers send nothing new.

        Raises:
            Unavailable: the registry cannot be reached.
        """
        assert self._registration is not None, "registered"
        _log.info("worker_draining", worker=self._name, requests=len(self._frontends.requests))
        self.instance = msgspec.structs.replace(self.instance, state=InstanceState.DRAINING)
        await self._registration.update(self.instance)

    async def _say_ready(self) -> None:
        """Have routers send requests again; a registry that is away is told when it is back."""
        assert self._registration is not None, "registered"
        while True:
            try:
                await self._registration.update(self.instance)
            except Unavailable as error:
                _log.warning("return_not_announced", worker=self._name, error=error.message)
                await asyncio.sleep(_TELL_AGAIN_S)
            else:
                return

    async def _drain(self, quiet: Callable[[], Awaitable[object]], does: str) -> PenstockError:
        """Take nothing from when every router knows, wait until it is quiet, hand the rest to other workers.

        Returns:
            what those are refused with that come now.
        """
        await asyncio.sleep(self._config.drain_notice_s)
        refusal = Overloaded(
            f"{self._name} is draining and takes nothing new; try another worker", retry_after_s=1.0
        )
        if self.refusal is None:
            self.refusal = refusal
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await quiet()
        except TimeoutError:
            left = tuple(self._frontends.requests.items())
            _log.warning("requests_handed_over", worker=self._name, requests=len(left))
            self._end_all(
                Unavailable(f"{self._name} {does}, after {self._config.drain_timeout_s:g} s of draining")
            )
            for request_id, running in left:
                self._driver.abort(request_id, running.frontend)
        return refusal

    async def _nobody_needs_it(self) -> None:
        await self._frontends.idle.wait()
        await self._driver.wait_until_read()


def _conflict(message: str) -> RequestError:
    return RequestError(message, http_status=409)
