"""What scales the workers of one host of several."""

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.core.types.instances import Role, Scale


class Host(Protocol):
    """A `ScalingConnector` of one host's workers. `elsewhere` names roles that ready workers of other hosts have.

    A host's last worker of such a role may leave; without, it stays. Errors as of `ScalingConnector`.
    """

    async def scale(self, after: int | None = None) -> Scale: ...

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]: ...

    async def retire(
        self,
        names: Sequence[str],
        *,
        by: str,
        revision: int | None = None,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> None: ...

    async def flip(
        self,
        name: str,
        role: Role,
        *,
        by: str,
        revision: int | None = None,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> None: ...


class Hosts(Protocol):
    """Takes hosts as they come and go.

    Attributes:
        given_up: called with the name of each host that was lost and is no longer waited for.
    """

    given_up: Callable[[str], None]

    def join(self, name: str, host: Host, scale: Scale) -> None:
        """Take a host, whose workers are as `scale` says.

        Raises:
            PenstockError: it cannot be one of them.
        """
        ...

    def leave(self, name: str, *, on_purpose: bool) -> None:
        """Note that a host does not answer any more; `on_purpose`: it ends."""
        ...

    def label(self, name: str, process: str) -> str:
        """Give the name that a host's process has among those of all hosts."""
        ...
