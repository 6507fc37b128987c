"""Discovery: which workers serve which models."""

from collections.abc import AsyncIterator
from typing import Protocol

from penstock.core.types.instances import Instance, InstanceChange


class Registration(Protocol):
    """A registered instance; its lease is renewed until `close`."""

    async def update(self, instance: Instance) -> None:
        """Replace the instance that watchers see, for example when the worker begins to drain."""
        ...

    async def close(self) -> None:
        """Withdraw the instance at once, before its lease expires. Safe twice."""
        ...


class Discovery(Protocol):
    """A registry of instances with leases."""

    async def register(self, instance: Instance) -> Registration:
        """Announce an instance and renew its lease.

        Raises:
            Unavailable: the registry cannot be reached.
        """
        ...

    def watch(self) -> AsyncIterator[InstanceChange]:
        """Yield all present instances, then `WatchSynced`, then every change, until the iterator is closed.

        A registry that becomes unreachable is no error: once it is back, the iterator yields the differences and
        another `WatchSynced`.
        """
        ...

    async def close(self) -> None: ...
