"""Who serves what."""

from collections.abc import AsyncIterator
from typing import Protocol

from penstock.core.types.instances import Instance, InstanceChange


class Registration(Protocol):
    """A worker's place in discovery; the lease is renewed until `close`."""

    async def update(self, instance: Instance) -> None:
        """Replace what watchers see, as when a worker begins to drain."""
        ...

    async def close(self) -> None:
        """Withdraw at once, without waiting for the lease to run out. Safe twice."""
        ...


class Discovery(Protocol):
    """Who serves what, kept true by leases."""

    async def register(self, instance: Instance) -> Registration:
        """Announce an instance and keep its lease.

        Raises:
            Unavailable: the registry cannot be reached.
        """
        ...

    def watch(self) -> AsyncIterator[InstanceChange]:
        """Yield what is present, then `WatchSynced`, then every change, until the iterator is closed.

        A registry that goes away is no error: the iterator waits, and yields the differences
        (ending with another `WatchSynced`) once it is back.
        """
        ...

    async def close(self) -> None: ...
