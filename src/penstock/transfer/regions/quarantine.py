"""Deregistered memory that may still be in use: by peers that do not answer, or by requests that cannot be cancelled, as NIXL's.

It is kept alive until nothing uses it; `deregister` raises `MemoryInUse` meanwhile.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from weakref import WeakSet

from penstock.core.errors import MemoryInUse
from penstock.core.log import get_logger
from penstock.seams import Storage, Transport
from penstock.transfer.link.grants import Grants
from penstock.transfer.link.links import AgentLink
from penstock.transfer.regions.regions import Registration

_log = get_logger()

_left_behind: list[Registration] = []
"""Memory that closed agents could not release; it stays allocated as long as the process runs."""


class Quarantine:
    """The quarantine of one agent. Its event loop owns it."""

    def __init__(
        self, owner: str, transports: Mapping[str, Transport], storage: Mapping[str, Storage], grants: Grants
    ) -> None:
        """Begin empty.

        Args:
            owner: the agent's name.
            transports: those that work here.
            storage: likewise.
            grants: the regions that peers can access by themselves.
        """
        self._grants = grants
        self._owner = owner
        self._transports = transports
        self._parts: list[Transport | Storage] = [*transports.values(), *storage.values()]
        self._departing: dict[AgentLink, set[int]] = {}
        self._held: dict[int, Registration] = {}
        self._freed: WeakSet[Registration] = WeakSet()

    def __contains__(self, registration: Registration) -> bool:
        """Whether it is held, or was freed since its last `deregister` raised."""
        return self._held.get(registration.region_id) is registration or registration in self._freed

    @property
    def held(self) -> tuple[Registration, ...]:
        """Deregistered memory that is not free yet."""
        return tuple(self._held.values())

    def note_departure(self, link: AgentLink) -> bool:
        """Note the memory that a leaving peer may still use, until the peer has released it.

        Returns:
            whether there is any.
        """
        exposed = set(self._grants.to(link)).union(
            *(transport.exposed_to(link) for transport in self._transports.values())
        )
        if exposed and not link.gone.done():
            if link not in self._departing:
                self._departing[link] = set()
                link.gone.add_done_callback(lambda _: self._departing.pop(link, None))
            self._departing[link] |= exposed
        return link in self._departing

    async def release(self, registration: Registration, within_s: float) -> None:
        """Wait until nothing uses deregistered memory.

        Raises:
            MemoryInUse: something may still use it after `within_s`.
        """
        region_id = registration.region_id
        users = self._users(region_id)
        if not users:
            self._freed.discard(registration)
            return
        if registration not in self:
            self._held[region_id] = registration
            call_after(users, lambda: self._free(region_id))
        await asyncio.wait(users, timeout=within_s)
        if self._users(region_id):
            text = self._text([registration])
            _log.warning("memory_quarantined", agent=self._owner, region=region_id, error=text)
            raise MemoryInUse(text)
        self._freed.discard(registration)

    async def drain(self, registrations: Iterable[Registration], within_s: float) -> None:
        """Wait until nothing uses any memory of a closing agent.

        Raises:
            MemoryInUse: something may still use a region after `within_s`; its memory stays allocated.
        """
        links = list(self._departing)
        if links:
            await asyncio.wait([link.gone for link in links], timeout=within_s)
        used = [each for each in (*registrations, *self._held.values()) if self._users(each.region_id)]
        for link in self._departing:
            link.abandon()
        if used:
            _left_behind.extend(used)
            text = self._text(used)
            _log.warning("memory_quarantined", agent=self._owner, error=text)
            raise MemoryInUse(text)

    def _free(self, region_id: int) -> None:
        self._freed.add(self._held.pop(region_id))

    def _users(self, region_id: int) -> list["asyncio.Future[None]"]:
        lingering = [user for one in self._parts for user in one.lingering(region_id)]
        departing = [link.gone for link, exposed in self._departing.items() if region_id in exposed]
        return [user for user in (*departing, *lingering) if not user.done()]

    def _text(self, registrations: list[Registration]) -> str:
        ids = {registration.region_id for registration in registrations}
        peers = sorted({link.peer for link, exposed in self._departing.items() if exposed & ids})
        who = (
            f"by agent {', '.join(peers)}, which neither answers nor ends"
            if peers
            else "by what was cancelled"
        )
        what = ", ".join(str(region_id) for region_id in sorted(ids))
        return (
            f"region {what} of agent {self._owner} may still be read or written {who}: its memory is kept and must not be"
            " used for anything else; call deregister again to wait on, or end that process"
        )


def call_after(users: Iterable["asyncio.Future[None]"], call: Callable[[], object]) -> None:
    """Call a function once all futures are done; at once if there are none."""
    left = set(users)

    def ended(user: "asyncio.Future[None]") -> None:
        left.discard(user)
        if not left:
            call()

    for user in tuple(left):
        user.add_done_callback(ended)
    if not left:
        call()
