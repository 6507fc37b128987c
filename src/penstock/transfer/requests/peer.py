"""The other side of transfers: another agent, or the agent itself."""

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
    """A connected agent with its regions and routes, from `TransferAgent.connect`."""

    def __init__(self, name: str, token: bytes, link: AgentLink | None) -> None:
        """Begin without regions and routes.

        Args:
            name: the peer's.
            token: of its metadata; another one after it restarts.
            link: to it; None for the agent's own memory.
        """
        self.name = name
        self.token = token
        self.link = link
        self.routes: dict[str, Route] = {}
        """Routes to it by transport."""
        self.unreachable: dict[str, str] = {}
        """By transport, why it does not reach the peer."""
        self.infos: dict[int, RegionInfo] = {}

    def learn(self, infos: Iterable[RegionInfo]) -> None:
        """Add regions; keys that were given before stay valid."""
        for info in infos:
            older = self.infos.get(info.region_id)
            self.infos[info.region_id] = info if older is None else info.with_keys_of(older)

    def check_given(self, region_id: int, op: TransferOp) -> None:
        """Check that the peer gave a region for this direction.

        Raises:
            TransferRefused: it did not, or the region is gone.
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

    async def close_routes(self) -> None:
        """Close all channels to it; for the agent."""
        while self.routes:
            _, route = self.routes.popitem()
            await route.channel.close()

    def check_alive(self) -> None:
        """Check that the link lives.

        Raises:
            PeerLost: the link has ended.
        """
        if self.link is not None and self.link.error is not None:
            raise PeerLost(self.link.error.message)

    def check(self, ranges: Descriptors) -> None:
        """Check that ranges lie within regions that the peer gave.

        Raises:
            TransferRefused: a range does not.
        """
        for region_id in distinct(ranges.region_ids):
            expect_inside(ranges, region_id, self._info(region_id).size_bytes)

    def infos_of(self, ranges: Descriptors) -> list[RegionInfo]:
        return [self._info(region_id) for region_id in distinct(ranges.region_ids)]

    def routes_for(
        self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]
    ) -> tuple[list[Route], dict[str, str]]:
        """Find the routes that can move bytes between these regions, and by transport why others cannot."""
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
