"""A worker's entry in discovery: its role, whether it takes requests, and draining."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.core.errors import ConfigError, Overloaded, PenstockError, Unavailable, WorkerLost
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import (
    Distance,
    EngineInfo,
    Instance,
    InstanceState,
    Location,
    ModelCard,
    Role,
)
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
        self.drain_timeout_s = config.drain_timeout_s
        """Seconds that running requests may take when the worker drains; read when it begins to wait for them."""
        self._config = config
        self._frontends = frontends
        self._driver = driver
        self._end_all = end_all
        self._registration: Registration | None = None

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

    async def set_aside(self, does: str, *, until_read: bool) -> None:
        """Drain for a change; `resume` or `rest` follows.

        Args:
            does: what the worker does next, for the error of migrated requests.
            until_read: whether to wait for exported KV too.

        Raises:
            WorkerLost: the engine died meanwhile.
            Unavailable: the registry cannot be reached.
        """
        try:
            await self._publish_draining()
            quiet = self._wait_until_unused if until_read else self._frontends.idle.wait
            refusal = await self._drain(quiet, does)
        except BaseException:
            self.instance = msgspec.structs.replace(self.instance, state=InstanceState.READY)
            raise
        if self.refusal is not None and self.refusal is not refusal:
            raise self.refusal

    async def resume(self, **changed: object) -> None:
        """Take requests again, with these fields of the entry changed.

        Raises:
            WorkerLost: the engine has died.
        """
        self._check_alive()
        self.instance = msgspec.structs.replace(self.instance, state=InstanceState.READY, **changed)
        self.refusal = None
        await self._publish()

    async def rest(self) -> None:
        """Register as asleep, and refuse what comes; raises as `resume`."""
        self._check_alive()
        self.instance = msgspec.structs.replace(self.instance, state=InstanceState.ASLEEP)
        self.refusal = Overloaded(f"{self._name} is asleep; try another worker", retry_after_s=1.0)
        await self._publish()

    async def note_problem(self, problem: str) -> None:
        """Publish why the engine cannot serve for now, empty where it can; retry until the registry can be reached."""
        self.instance = msgspec.structs.replace(self.instance, problem=problem)
        await self._publish()

    def _check_alive(self) -> None:
        if isinstance(self.refusal, WorkerLost):
            raise self.refusal

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
            async with asyncio.timeout(self.drain_timeout_s):
                await quiet()
        except TimeoutError:
            left = tuple(self._frontends.requests.items())
            _log.warning("requests_migrated", worker=self._name, requests=len(left))
            self._end_all(Unavailable(f"{self._name} {does}, after {self.drain_timeout_s:g} s of draining"))
            for request_id, running in left:
                self._driver.abort(request_id, running.frontend)
        return refusal

    async def _wait_until_unused(self) -> None:
        await self._frontends.idle.wait()
        await self._driver.wait_until_read()


def fitting_card(card: ModelCard, info: EngineInfo) -> ModelCard:
    """Lower a model card's context length to the engine's, and name the media that the engine takes.

    Raises:
        ConfigError: their block sizes differ.
    """
    if card.block_size != info.block_size:
        raise ConfigError(
            f"block_size: the model card says {card.block_size} tokens and the engine {info.block_size}; make them equal"
        )
    context_length = min(card.context_length, info.context_length)
    return msgspec.structs.replace(card, context_length=context_length, media=info.media)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Name, id, role and location of a worker. `engine` is its engine's name in the graph, for messages; `distance` as in `Instance`."""

    worker_id: WorkerId
    name: str
    role: Role = Role.AGGREGATED
    pid: int = 0
    engine: str = "of this worker"
    location: Location = field(default_factory=Location)
    distance: Distance | None = None

    def place(self) -> dict[str, Any]:
        """Give the fields of an `Instance` that say where it is."""
        return {**self.location.model_dump(), "distance": self.distance}
