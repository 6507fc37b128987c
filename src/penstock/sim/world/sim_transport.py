"""The simulated transport: moves no bytes, and takes the time of the network between two hosts."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from penstock.core.descriptors import Access, RangePairs, Region, RegionInfo, TransferCost, TransferOp
from penstock.perf.topology import NetworkPath
from penstock.seams import Link, TransportHost
from penstock.sim.world.network import SimNetwork
from penstock.transfer.transports.quiet import QuietTransport

NAME = "timed"
_CROSSINGS = 4
"""One-way latencies per transfer: request, bytes, completion, its acknowledgement. Links between simulated agents take no
time themselves."""


class SimTransports:
    """The transports of all hosts. One event loop owns it.

    A host's port sends one transfer after the other, in the order in which they were asked for, each at the full speed of
    its path, and receives likewise (docs/decisions/0011).
    """

    def __init__(self, network: SimNetwork, path: Callable[[str, str], NetworkPath]) -> None:
        """Create it without transfers.

        Args:
            network: gives reachability.
            path: gives the network path of KV between two hosts.
        """
        self.received_bytes: Counter[str] = Counter()
        """Bytes received, by host."""
        self._network = network
        self._path = path
        self._sends_until_s: dict[str, float] = {}
        self._receives_until_s: dict[str, float] = {}

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def at(self, host: str) -> "SimTransport":
        """Give a host's transport."""
        return SimTransport(self, host)

    def path(self, one: str, other: str) -> NetworkPath:
        """Give the network path of KV between two hosts."""
        return self._path(one, other)

    async def move(self, source: str, target: str, path: NetworkPath, num_bytes: int) -> None:
        """Wait for the time of a transfer; a cancelled one keeps its ports busy."""
        now_s = self._loop.time()
        start_s = max(now_s, self._sends_until_s.get(source, 0.0), self._receives_until_s.get(target, 0.0))
        end_s = start_s + num_bytes / path.bandwidth_bytes_per_s
        self._sends_until_s[source] = self._receives_until_s[target] = end_s
        await asyncio.sleep(end_s + _CROSSINGS * path.latency_s - now_s)
        await self._network.opened(source, target)
        self.received_bytes[target] += num_bytes


class SimTransport(QuietTransport):
    """The `seams.Transport` of one host; accepts any memory and touches none."""

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
    """Channel from one host to another."""

    def __init__(self, sim_transports: SimTransports, here: str, there: str) -> None:
        self._sim_transports = sim_transports
        self._here, self._there = here, there
        self._path = sim_transports.path(here, there)

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op, local, remote
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        path = self._path
        return TransferCost(
            start_s=_CROSSINGS * path.latency_s, range_s=0.0, bytes_per_s=path.bandwidth_bytes_per_s
        )

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> "SimMove":
        del checksum
        ends = (self._there, self._here) if op is TransferOp.READ else (self._here, self._there)
        return SimMove(self._sim_transports, ends, self._path, pairs.total_bytes)

    def forget(self, region_id: int) -> None: ...

    async def close(self) -> None: ...


class SimMove:
    """One transfer from one host to another."""

    def __init__(
        self, sim_transports: SimTransports, ends: tuple[str, str], path: NetworkPath, num_bytes: int
    ) -> None:
        self._sim_transports = sim_transports
        self._ends = ends
        self._path = path
        self._num_bytes = num_bytes

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        await self._sim_transports.move(*self._ends, self._path, self._num_bytes)
