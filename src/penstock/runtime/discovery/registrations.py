"""What one process registers in etcd, NATS or Kubernetes, and which of its registrations are not there yet."""

import asyncio
from collections.abc import Callable, Iterator

from penstock.core.errors import Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance
from penstock.runtime.config import DiscoveryConfig

_log = get_logger()


class Registrations:
    """The registrations of one client, stored by its task whenever some are `unsent`. One event loop owns it."""

    def __init__(self, config: DiscoveryConfig, *, problem: Callable[[], str]) -> None:
        """Have none.

        Args:
            config: times.
            problem: says why the registry has not stored one in time.
        """
        self.current: dict[WorkerId, StoredRegistration] = {}
        self.wake = asyncio.Event()
        """Set when there is something to do for the task that stores."""
        self._unsent: dict[WorkerId, StoredRegistration] = {}
        """Those that the registry does not have as they are, and those withdrawn."""
        self._config = config
        self._problem = problem

    async def register(self, instance: Instance) -> "StoredRegistration":
        """Register, and wait until it is stored.

        Raises:
            Unavailable: it is not stored in time.
        """
        registration = StoredRegistration(self, instance)
        self.current[instance.worker_id] = registration
        self._send(registration)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await registration.stored.wait()
        except TimeoutError as error:
            self._withdraw(registration)  # where only the answer was lost
            raise Unavailable(
                f"{self._problem()}; waited {self._config.connect_timeout_s:g} s (connect_timeout_s)"
            ) from error
        return registration

    async def close(self) -> None:
        """Withdraw all."""
        for registration in tuple(self.current.values()):
            await registration.close()

    def resend_all(self) -> None:
        """Store all again: the registry may have lost them, or forgets what is not renewed."""
        for worker_id, registration in self.current.items():
            self._unsent.setdefault(worker_id, registration)

    def unsent(self) -> "Iterator[tuple[StoredRegistration, Instance | None]]":
        """Yield what is to be stored, with None for what is to be deleted, each once; the caller calls `sent` for what it stored."""
        tried: dict[WorkerId, tuple[StoredRegistration, Instance | None]] = {}
        while True:
            for worker_id, registration in self._unsent.items():
                is_current = self.current.get(worker_id) is registration
                instance = registration.instance if is_current else None
                if tried.get(worker_id) != (registration, instance):
                    break
            else:
                return
            tried[worker_id] = (registration, instance)
            yield registration, instance

    def sent(self, registration: "StoredRegistration", instance: Instance | None) -> None:
        """Note that the registry has what `unsent` yielded, unless that has changed meanwhile."""
        worker_id = registration.instance.worker_id
        if self._unsent.get(worker_id) is not registration:
            return
        is_current = self.current.get(worker_id) is registration
        if instance is (registration.instance if is_current else None):
            del self._unsent[worker_id]
            registration.stored.set()

    async def until_due(self, renew_s: float | None) -> bool:
        """Wait until something changes; return False where `renew_s` has passed instead (None: never)."""
        try:
            async with asyncio.timeout(renew_s):
                await self.wake.wait()
        except TimeoutError:
            return False
        self.wake.clear()
        return True

    def _send(self, registration: "StoredRegistration") -> None:
        registration.stored.clear()
        self._unsent[registration.instance.worker_id] = registration
        self.wake.set()

    def _withdraw(self, registration: "StoredRegistration") -> None:
        worker_id = registration.instance.worker_id
        if self.current.get(worker_id) is registration:
            del self.current[worker_id]
            self._send(registration)


class StoredRegistration:
    """One worker's registration, stored again as long as it lives."""

    def __init__(self, owner: Registrations, instance: Instance) -> None:
        self.instance = instance
        self.stored = asyncio.Event()
        """Set while the registry has it as it is."""
        self._owner = owner

    async def update(self, instance: Instance) -> None:
        if self._owner.current.get(instance.worker_id) is self:
            self.instance = instance
            self._owner._send(self)

    async def close(self) -> None:
        owner = self._owner
        if owner.current.get(self.instance.worker_id) is not self:
            return
        owner._withdraw(self)
        try:
            async with asyncio.timeout(owner._config.connect_timeout_s):
                await self.stored.wait()
        except TimeoutError:
            _log.warning(
                "withdrawal_not_stored", worker=self.instance.name, fix="its lease expires by itself"
            )
