"""A worker's entry in discovery: its role, whether it takes requests, draining and role changes."""

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

_RETRY_S = 1.0
"""Delay before an update that the registry could not take is sent again."""

_log = get_logger()


class WorkerRegistration:
    """One worker's entry in discovery. One event loop owns it."""

    def __init__(
        self,
        instance: Instance,
        config: WorkerConfig,
        frontends: Frontends,
        driver: EngineDriver,
        end_all: Callable[[PenstockError], None],
    ) -> None:
        """Make an entry; `register` publishes it.

        Args:
            instance: the worker at start.
            config: times of draining.
            frontends: connected frontends and their requests.
            driver: runs these requests on the engine.
            end_all: ends every request with a retryable error, so that it migrates to another worker.
        """
        self.instance = instance
        self.refusal: PenstockError | None = None
        """Why the worker takes no requests; None while it does."""
        self._config = config
        self._frontends = frontends
        self._driver = driver
        self._end_all = end_all
        self._registration: Registration | None = None
        self._changing_to: Role | None = None

    async def register(self, discovery: Discovery) -> None:
        """Publish the entry.

        Raises:
            Unavailable: the registry cannot be reached.
        """
        self._registration = await discovery.register(self.instance)
        _log.info("worker_registered", worker=self.instance.name, address=self.instance.address)

    async def withdraw(self) -> None:
        """Remove the entry. Safe twice."""
        if self._registration is not None:
            await self._registration.close()

    async def leave(self) -> None:
        """Drain: refuse new requests, wait for running ones and for exported KV, migrate the rest to other workers."""
        try:
            await self._publish_draining()
        except Unavailable as error:
            _log.warning("drain_not_announced", worker=self._name, error=error.message)
        await self._drain(self._wait_until_unused, "stops")
        _log.info("worker_drained", worker=self._name)

    async def change(self, role: Role) -> None:
        """Drain requests and register again in another role. The model stays loaded, and exported KV stays readable.

        Raises:
            RequestError: the worker cannot take this role (409).
            WorkerLost: the engine died meanwhile.
            Unavailable: the registry cannot be reached.
        """
        self.check_change(role)
        self._changing_to = role
        try:
            await self._driver.prepare(role)
            try:
                await self._publish_draining()
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
            await self._publish()
            _log.info("role_changed", worker=self._name, role=role, before=before)
        finally:
            self._changing_to = None

    async def note_problem(self, problem: str) -> None:
        """Publish why the engine cannot serve for now, empty where it can; retry until the registry can be reached."""
        self.instance = msgspec.structs.replace(self.instance, problem=problem)
        await self._publish()

    def check_change(self, role: Role) -> None:
        """Check that the role may be changed now.

        Raises:
            RequestError: another change is in progress, the worker drains, or it has this role already (409).
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

    async def _publish_draining(self) -> None:
        """Register as draining, so that routers send no new requests.

        Raises:
            Unavailable: the registry cannot be reached.
        """
        assert self._registration is not None, "registered"
        _log.info("worker_draining", worker=self._name, requests=len(self._frontends.requests))
        self.instance = msgspec.structs.replace(self.instance, state=InstanceState.DRAINING)
        await self._registration.update(self.instance)

    async def _publish(self) -> None:
        """Publish the entry as it is; retry until the registry can be reached."""
        assert self._registration is not None, "registered"
        while True:
            try:
                await self._registration.update(self.instance)
            except Unavailable as error:
                _log.warning("return_not_announced", worker=self._name, error=error.message)
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def _drain(self, quiet: Callable[[], Awaitable[object]], does: str) -> PenstockError:
        """Refuse new requests after `drain_notice_s`, wait for `quiet`, then migrate the rest to other workers.

        Args:
            quiet: waits until the worker is idle.
            does: what the worker does next, for the error of migrated requests.

        Returns:
            the error that new requests are refused with.
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
            _log.warning("requests_migrated", worker=self._name, requests=len(left))
            self._end_all(
                Unavailable(f"{self._name} {does}, after {self._config.drain_timeout_s:g} s of draining")
            )
            for request_id, running in left:
                self._driver.abort(request_id, running.frontend)
        return refusal

    async def _wait_until_unused(self) -> None:
        await self._frontends.idle.wait()
        await self._driver.wait_until_read()


def _conflict(message: str) -> RequestError:
    return RequestError(message, http_status=409)
