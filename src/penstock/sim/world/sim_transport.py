"""The simulated transport: moves no bytes, and takes the time that the network between two hosts would."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from penstock.core.descriptors import Access, RangePairs, Region, RegionInfo, TransferCost, TransferOp
from penstock.perf.topology import Way
from penstock.seams import Link, TransportHost
from penstock.sim.world.network import SimNetwork
from penstock.transfer.transports.quiet import QuietTransport

NAME = "wires"
_CROSSINGS = 4
"""Of the way, each of its latency: the request, the bytes, the word that they are read, and its answer. Links between the
agents of a simulation take no time by themselves."""


class SimTransports:
    """Those of all hosts. One event loop owns it.

    A host's port sends one transfer after the other, in the order in which they were asked for, each at the full speed of
    its way, and receives likewise (docs/decisions/0011).
    """

    def __init__(self, network: SimNetwork, way: Callable[[str, str], Way]) -> None:
        """Begin idle.

        Args:
            network: says whether two hosts reach each other.
            way: what lies between two hosts for KV.
        """
        self.received_bytes: Counter[str] = Counter()
        """By host."""
        self._network = network
        self._way = way
        self._sends_until_s: dict[str, float] = {}
        self._receives_until_s: dict[str, float] = {}

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def at(self, host: str) -> "SimTransport":
        """Give a host's end."""
        return SimTransport(self, host)

    def way(self, one: str, other: str) -> Way:
        """Say what lies between two hosts for KV."""
        return self._way(one, other)

    async def move(self, source: str, target: str, way: Way, num_bytes: int) -> None:
        """Let a transfer's time go by; the ports' time stays taken where it is cancelled."""
        now_s = self._loop.time()
        start_s = max(now_s, self._sends_until_s.get(source, 0.0), self._receives_until_s.get(target, 0.0))
        end_s = start_s + num_bytes / way.bandwidth_bytes_per_s
        self._sends_until_s[source] = self._receives_until_s[target] = end_s
        await asyncio.sleep(end_s + _CROSSINGS * way.latency_s - now_s)
        await self._network.opened(source, target)
        self.received_bytes[target] += num_bytes


class SimTransport(QuietTransport):
    """A `seams.Transport` of one host. It takes any memory, and touches none."""

    name = NAME
    checksums = False

    def __init__(self, sim_transports: SimTransports, host: str) -> None:
        self._sim_transports = sim_transports
        self._host = host

    async def start(self, host: TransportHost) -> None: ...

    def contact(self) -> bytes:
        return self._host.encode()

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        del region_id, region, access
        return b""

    async def deregister(self, region_id: int) -> None: ...

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> "SimChannel":
        del link, regions
        return SimChannel(self._sim_transports, self._host, contact.decode())

    async def close(self) -> None: ...


class SimChannel:
    """From one host to another."""

    def __init__(self, sim_transports: SimTransports, here: str, there: str) -> None:
        self._sim_transports = sim_transports
        self._here, self._there = here, there
        self._way = sim_transports.way(here, there)

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op, local, remote
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        way = self._way
        return TransferCost(
            start_s=_CROSSINGS * way.latency_s, range_s=0.0, bytes_per_s=way.bandwidth_bytes_per_s
        )

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> "SimMove":
        del checksum
        ends = (self._there, self._here) if op is TransferOp.READ else (self._here, self._there)
        return SimMove(self._sim_transports, ends, self._way, pairs.total_bytes)

    def forget(self, region_id: int) -> None: ...

    async def close(self) -> None: ...


class SimMove:
    """So many bytes from one host to another."""

    def __init__(
        self, sim_transports: SimTransports, ends: tuple[str, str], way: Way, num_bytes: int
    ) -> None:
        self._sim_transports = sim_transports
        self._ends = ends
        self._way = way
        self._num_bytes = num_bytes

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        await self._sim_transports.move(*self._ends, self._way, self._num_bytes)
