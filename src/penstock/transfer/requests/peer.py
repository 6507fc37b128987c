"""Another agent, or this one itself, as somewhere to move bytes to and from."""

from collections.abc import Iterable, Mapping, Sequence

from penstock.core.descriptors import Descriptors, MemoryKind, Region, RegionInfo, TransferOp
from penstock.core.errors import PeerLost, TransferRefused
from penstock.transfer.link.links import AgentLink
from penstock.transfer.regions.regions import RemoteRegion, distinct, expect_inside
from penstock.transfer.requests.routes import Route

_STORED = {
    MemoryKind.FILE: "files of agent {} are reached by itself only; read its memory instead",
    MemoryKind.OBJECT: "object stores of agent {} are reached by itself only; register the same one here",
}


class Peer:
    """What this agent knows of another one. `TransferAgent.connect` gives it."""

    def __init__(self, name: str, token: bytes, link: AgentLink | None) -> None:
        """Know nothing of its memory yet.

        Args:
            name: the peer's.
            token: names its incarnation.
            link: to it; None for the agent's own memory.
        """
        self.name = name
        self.token = token
        self.link = link
        self.routes: dict[str, Route] = {}
        """By transport; those that reach it."""
        self.unreachable: dict[str, str] = {}
        """Why other transports do not, by name."""
        self.infos: dict[int, RegionInfo] = {}

    def learn(self, infos: Iterable[RegionInfo]) -> None:
        """Know these regions, too; what was given before stays given."""
        for info in infos:
            older = self.infos.get(info.region_id)
            self.infos[info.region_id] = info if older is None else info.with_keys_of(older)

    def check_given(self, region_id: int, op: TransferOp) -> None:
        """Refuse what the peer has not given, or has withdrawn.

        Raises:
            TransferRefused: the region is gone, or was not given for this direction.
        """
        info = self.infos.get(region_id)
        if info is None:
            raise TransferRefused(f"region {region_id} of agent {self.name} is gone")
        if not info.key(op):
            given = "read-only" if op is TransferOp.WRITE else "write-only"
            raise TransferRefused(
                f"region {region_id} of agent {self.name} was given {given}; its owner has to register it, and give its"
                " metadata, with access=Access.BOTH"
            )

    @property
    def regions(self) -> Mapping[str, RemoteRegion]:
        """The named regions that this agent was given."""
        return {info.name: RemoteRegion(info.region_id, info) for info in self.infos.values() if info.name}

    def region(self, name: str) -> RemoteRegion:
        """Look up a region by its name.

        Raises:
            TransferRefused: it was not given.
        """
        found = self.regions.get(name)
        if found is None:
            given = ", ".join(sorted(self.regions)) or "none"
            raise TransferRefused(f"agent {self.name} gave no region named {name!r}; given: {given}")
        return found

    @property
    def is_lost(self) -> bool:
        """Whether the link has ended."""
        return self.link is not None and self.link.error is not None

    async def close_ways(self) -> None:
        """Let go of all that transports opened for it; for the agent."""
        while self.routes:
            _, route = self.routes.popitem()
            await route.channel.close()

    def check_alive(self) -> None:
        """Refuse to use what is gone.

        Raises:
            PeerLost: the link has ended.
        """
        if self.link is not None and self.link.error is not None:
            raise PeerLost(self.link.error.message)

    def check(self, ranges: Descriptors) -> None:
        """Check that ranges lie in what this agent was given.

        Raises:
            TransferRefused: one does not.
        """
        for region_id in distinct(ranges.region_ids):
            expect_inside(ranges, region_id, self._info(region_id).size_bytes)

    def infos_of(self, ranges: Descriptors) -> list[RegionInfo]:
        return [self._info(region_id) for region_id in distinct(ranges.region_ids)]

    def ways_for(
        self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]
    ) -> tuple[list[Route], dict[str, str]]:
        """Find the transports that can move between these, and why the others cannot."""
        able: list[Route] = []
        refusals = dict(self.unreachable)
        if self.link is not None:
            refusals |= {
                kind.value: _STORED[kind].format(self.name)
                for kind in dict.fromkeys(info.kind for info in remote)
                if kind in _STORED
            }
        for route in self.routes.values():
            refusal = route.channel.refusal(op, local, remote)
            if refusal is None:
                able.append(route)
            else:
                refusals[route.name] = refusal
        return able, refusals

    def _info(self, region_id: int) -> RegionInfo:
        info = self.infos.get(region_id)
        if info is None:
            raise TransferRefused(
                f"region {region_id} of agent {self.name} was not given to this agent, or is gone; connect with metadata"
                " that has it"
            )
        return info
