"""Scaling: starts workers, ends them, and changes their roles."""

from collections.abc import Sequence
from typing import Protocol

from penstock.core.types.instances import Role, Scale


class ScalingConnector(Protocol):
    """Changes the number of workers of one deployment. Every change is made whole or not at all.

    `by` names the caller in `Scale.changed_by` and in logs. With `revision`, the caller's last seen one, a change is refused
    (409) if another was accepted since. Errors of all methods: Unavailable, nobody answers.
    """

    async def scale(self, after: int | None = None) -> Scale:
        """Return the workers as they are now.

        Args:
            after: wait until `Scale.sequence` exceeds this number, at most some seconds.
        """
        ...

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        """Begin to start workers; returns their names at once, before they are ready.

        Raises:
            RequestError: the role is not of this deployment (404); nothing is free for so many, or `revision` is old (409).
        """
        ...

    async def retire(self, names: Sequence[str], *, by: str, revision: int | None = None) -> None:
        """Begin to end workers; returns at once. They get no new requests; running ones finish or migrate.

        Raises:
            RequestError: there is no such worker (404); it drains already, no worker that is ready would answer requests,
                or `revision` is old (409).
        """
        ...

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        """Change the role of a ready worker; returns once it takes requests in that role. Its model stays loaded.

        Raises:
            RequestError: there is no such worker (404); it is not ready, cannot take the role, or has it; no worker would
                answer requests; or `revision` is old (409).
        """
        ...

    async def close(self) -> None: ...
