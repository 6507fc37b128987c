"""The simulated transport: moves no bytes, and takes the time of the network between two hosts."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from pydantic import Field

from penstock.core.config import Config
from penstock.core.descriptors import Access, RangePairs, Region, RegionInfo, TransferCost, TransferOp
from penstock.core.types.instances import Location
from penstock.perf.topology import NetworkPath, Topology
from penstock.seams import Link, TransportHost
from penstock.transfer.transports.quiet import QuietTransport

REGISTRY = "registry"
"""Host of the discovery registry."""


class NetworkConfig(Config):
    """Network of a simulation."""

    latency_s: float = Field(default=0.0002, ge=0)
    """One-way latency between hosts without a location."""
    jitter_s: float = Field(default=0.0, ge=0)
    """Each message's latency is increased by a random part of this; order is kept."""
    bandwidth_bytes_per_s: float = Field(default=1.25e9, gt=0)
    """Bandwidth per direction of a connection between hosts without a location."""
    event_loss: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of KV event messages that are lost."""
    load_delay_s: float = Field(default=0.0, ge=0)
    """Extra latency of load reports."""
    lease_ttl_s: float = Field(default=5.0, gt=0)
    """A registration that is not renewed for this long is dropped."""


class Cuttable(Protocol):
    """An object that depends on the path between two hosts."""

    @property
    def ends(self) -> tuple[str, str]: ...

    def on_path(self, *, is_open: bool) -> None:
        """Called when the path is cut or open again."""
        ...


class SimNetwork:
    """The paths between hosts, with their randomness. One event loop owns it."""

    def __init__(
        self,
        rng: random.Random,
        config: NetworkConfig | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.config = config or NetworkConfig()
        self._path = NetworkPath(
            latency_s=self.config.latency_s, bandwidth_bytes_per_s=self.config.bandwidth_bytes_per_s
        )
        self.rng = rng
        self.event_loss = self.config.event_loss
        """Fraction of lost KV events; may be changed during a run."""
        self._cuts: dict[tuple[str, str], int] = {}
        self._frozen: dict[str, int] = {}
        self._links: dict[Cuttable, None] = {}
        self._changed = asyncio.Event()
        self._topology = topology or Topology()
        self._locations: dict[str, Location] = {}

    def locate(self, host: str, location: Location) -> None:
        """Set a host's location; between two located hosts the topology holds instead of `config`."""
        self._locations[host] = location

    def path(self, one: str, other: str) -> NetworkPath:
        """Give the network path between two hosts."""
        here, there = self._locations.get(one), self._locations.get(other)
        return self._path if here is None or there is None else self._topology.path(here, there)

    def is_open(self, one: str, other: str) -> bool:
        """Tell whether two hosts can reach each other now."""
        return not (self._cuts.get(_pair(one, other)) or self._frozen.get(one) or self._frozen.get(other))

    async def reach(self, one: str, other: str) -> None:
        """Wait for the one-way latency of a path, and while it is cut."""
        await asyncio.sleep(self.latency_s(one, other))
        await self.opened(one, other)

    async def opened(self, one: str, other: str) -> None:
        """Wait while a path is cut."""
        while not self.is_open(one, other):
            await self._changed.wait()

    def latency_s(self, one: str, other: str) -> float:
        """Draw the latency of one message between two hosts."""
        return self.path(one, other).latency_s + self.jitter_s()

    def jitter_s(self) -> float:
        """Draw the jitter of one message."""
        jitter_s = self.config.jitter_s
        return self.rng.random() * jitter_s if jitter_s else 0.0

    def cut(self, one: str, other: str) -> None:
        """Cut the path between two hosts until `mend` was called as often as `cut`."""
        pair = _pair(one, other)
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        self._tell()

    def mend(self, one: str, other: str) -> None:
        _count_down(self._cuts, _pair(one, other))
        self._tell()

    def freeze(self, host: str) -> None:
        """Stop a host's traffic until `thaw` was called as often as `freeze`: its process is stopped."""
        self._frozen[host] = self._frozen.get(host, 0) + 1
        self._tell()

    def thaw(self, host: str) -> None:
        _count_down(self._frozen, host)
        self._tell()

    def add(self, link: Cuttable) -> None:
        """Call `link.on_path` for changes until `drop`."""
        self._links[link] = None
        if not self.is_open(*link.ends):
            link.on_path(is_open=False)

    def drop(self, link: Cuttable) -> None:
        self._links.pop(link, None)

    def check_at_rest(self) -> None:
        """Raise AssertionError if a cut or freeze was not undone."""
        assert not self._cuts, f"paths still cut: {sorted(self._cuts)}"
        assert not self._frozen, f"hosts still frozen: {sorted(self._frozen)}"

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for link in tuple(self._links):
            link.on_path(is_open=self.is_open(*link.ends))


@dataclass(slots=True)
class _Burst:
    """Messages sent at one moment: like one socket write, they arrive together once all bytes have."""

    arrival_s: float
    latency_s: float
    calls: list[tuple[Callable[..., None], tuple[Any, ...]]]


class Pipe:
    """One direction of a connection: messages arrive in order, and wait while the path is cut."""

    def __init__(self, network: SimNetwork, ends: tuple[str, str]) -> None:
        self.is_deaf = False
        """True once the far end is closed: arriving messages are lost."""
        self._network = network
        path = network.path(*ends)
        self._latency_s, self._bandwidth_bytes_per_s = path.latency_s, path.bandwidth_bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._bursts: deque[_Burst] = deque()
        self._newest: _Burst | None = None  # burst that may still grow
        self._sent_s = 0.0  # start time of the newest burst
        self._timer: asyncio.TimerHandle | None = None
        self._wire_free_s = 0.0
        self._last_s = 0.0
        self._is_open = True

    def send(self, num_bytes: int, call: Callable[..., None], *args: Any) -> None:
        """Make `call` at the far end once `num_bytes` have arrived there."""
        now_s = self._loop.time()
        wire_s = now_s if now_s > self._wire_free_s else self._wire_free_s
        self._wire_free_s = wire_s = wire_s + num_bytes / self._bandwidth_bytes_per_s
        burst = self._newest
        if burst is None or self._sent_s != now_s:
            self._sent_s = now_s
            latency_s = self._latency_s
            if self._network.config.jitter_s:
                latency_s += self._network.jitter_s()
            self._newest = burst = _Burst(0.0, latency_s, [])
            self._bursts.append(burst)
        burst.calls.append((call, args))
        arrival_s = wire_s + burst.latency_s
        if arrival_s > self._last_s:  # later messages never overtake
            self._last_s = arrival_s
        burst.arrival_s = self._last_s
        if self._timer is None and self._is_open:
            self._arm()

    def set_open(self, *, is_open: bool) -> None:
        """Pause or resume messages in flight."""
        self._is_open = is_open
        if not is_open:
            self._disarm()
        elif self._timer is None and self._bursts:
            self._arm()

    def hurry(self) -> None:
        """Deliver messages in flight now, unless the path is cut."""
        if self._is_open:
            for burst in self._bursts:
                burst.arrival_s = self._loop.time()
            self._disarm()
            self._deliver()

    def clear(self) -> None:
        """Drop messages in flight."""
        for burst in self._bursts:
            burst.calls.clear()
        self._bursts.clear()
        self._newest = None
        self._disarm()

    def _arm(self) -> None:
        self._timer = self._loop.call_at(self._bursts[0].arrival_s, self._deliver)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deliver(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        bursts = self._bursts
        while bursts and bursts[0].arrival_s <= now_s and self._is_open:
            burst = bursts.popleft()
            if burst is self._newest:
                self._newest = None
            for call, args in burst.calls:
                if not self.is_deaf:
                    call(*args)
        if bursts and self._is_open and self._timer is None:
            self._arm()


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one <= other else (other, one)


def _count_down(counts: dict[Any, int], key: Any) -> None:
    """Decrement a count; a missing key is a caller's bug."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


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
