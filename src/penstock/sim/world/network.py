"""A simulated network: who can reach whom, and when what was sent arrives.

Hosts are names. Every connection is two pipes, each in order, with latency and bandwidth. What is sent over
a cut path waits, as TCP would repeat it; a path that stays cut for longer than peers are patient ends its
connections on both sides.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field

from penstock.core.config import Config
from penstock.core.types.location import Location
from penstock.perf.topology import Topology, Way

REGISTRY = "registry"
"""The host where discovery lives."""


class NetworkConfig(Config):
    """What lies between the hosts of a simulation."""

    latency_s: float = Field(default=0.0002, ge=0)
    """One way, between any two hosts of which it is not known where they are."""
    jitter_s: float = Field(default=0.0, ge=0)
    """A random part of this is added to each message's latency; the order is kept."""
    bandwidth_bytes_per_s: float = Field(default=1.25e9, gt=0)
    """Of each direction of each connection, likewise."""
    event_loss: float = Field(default=0.0, ge=0, lt=1)
    """Share of KV event messages that never arrive."""
    load_delay_s: float = Field(default=0.0, ge=0)
    """Load reports arrive so much later than anything else."""
    lease_ttl_s: float = Field(default=5.0, gt=0)
    """A registration that is not renewed for this long is dropped."""


class Link(Protocol):
    """Something that depends on the path between two hosts."""

    @property
    def ends(self) -> tuple[str, str]: ...

    def on_path(self, *, is_open: bool) -> None:
        """Note that the path was cut, or is open again."""
        ...


class SimNetwork:
    """The paths between hosts, and all randomness on them. One event loop owns it."""

    def __init__(
        self,
        rng: random.Random,
        config: NetworkConfig | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.config = config or NetworkConfig()
        self._way = Way(
            latency_s=self.config.latency_s, bandwidth_bytes_per_s=self.config.bandwidth_bytes_per_s
        )
        self.rng = rng
        self.event_loss = self.config.event_loss
        """May be changed while it runs."""
        self._cuts: dict[tuple[str, str], int] = {}
        self._frozen: dict[str, int] = {}
        self._links: dict[Link, None] = {}
        self._news = asyncio.Event()
        self._topology = topology or Topology()
        self._locations: dict[str, Location] = {}

    def locate(self, host: str, location: Location) -> None:
        """Say where a host is; between two that are somewhere lies what the topology says, and not what `config` does."""
        self._locations[host] = location

    def way(self, one: str, other: str) -> Way:
        """Say what lies between two hosts."""
        here, there = self._locations.get(one), self._locations.get(other)
        return self._way if here is None or there is None else self._topology.way(here, there)

    def is_open(self, one: str, other: str) -> bool:
        """Say whether two hosts can reach each other now."""
        return not (self._cuts.get(_pair(one, other)) or self._frozen.get(one) or self._frozen.get(other))

    async def reach(self, one: str, other: str) -> None:
        """Go one way over a path, waiting for as long as it is cut."""
        await asyncio.sleep(self.latency_s(one, other))
        await self.opened(one, other)

    async def opened(self, one: str, other: str) -> None:
        """Wait for as long as a path is cut."""
        while not self.is_open(one, other):
            await self._news.wait()

    def latency_s(self, one: str, other: str) -> float:
        """Draw the latency of one message between two hosts."""
        return self.way(one, other).latency_s + self.jitter_s()

    def jitter_s(self) -> float:
        """Draw what one message is later than others."""
        jitter_s = self.config.jitter_s
        return self.rng.random() * jitter_s if jitter_s else 0.0

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two hosts until `mend`, as often as it was cut."""
        pair = _pair(one, other)
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        self._tell()

    def mend(self, one: str, other: str) -> None:
        _count_down(self._cuts, _pair(one, other))
        self._tell()

    def freeze(self, host: str) -> None:
        """Let nothing in or out of a host until `thaw`, as often as it was frozen: its process is stopped."""
        self._frozen[host] = self._frozen.get(host, 0) + 1
        self._tell()

    def thaw(self, host: str) -> None:
        _count_down(self._frozen, host)
        self._tell()

    def add(self, link: Link) -> None:
        """Tell `link` of its path until `drop`."""
        self._links[link] = None
        if not self.is_open(*link.ends):
            link.on_path(is_open=False)

    def drop(self, link: Link) -> None:
        self._links.pop(link, None)

    def check_at_rest(self) -> None:
        """Raise AssertionError where a fault was never taken back."""
        assert not self._cuts, f"paths still cut: {sorted(self._cuts)}"
        assert not self._frozen, f"hosts still frozen: {sorted(self._frozen)}"

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
        for link in tuple(self._links):
            link.on_path(is_open=self.is_open(*link.ends))


@dataclass(slots=True)
class _Burst:
    """What one end sent at one moment: it travels as one write does, and arrives once all its bytes have."""

    arrival_s: float
    latency_s: float
    calls: list[tuple[Callable[..., None], tuple[Any, ...]]]


class Pipe:
    """One direction of a connection: what is sent arrives in order, or waits while the path is cut."""

    def __init__(self, network: SimNetwork, ends: tuple[str, str]) -> None:
        self.is_deaf = False
        """Set once nobody listens at the far end: what arrives is lost."""
        self._network = network
        way = network.way(*ends)
        self._latency_s, self._bandwidth_bytes_per_s = way.latency_s, way.bandwidth_bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._bursts: deque[_Burst] = deque()
        self._newest: _Burst | None = None  # while more may join it
        self._sent_s = 0.0  # when it was begun
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
        if arrival_s > self._last_s:  # what is sent later never overtakes
            self._last_s = arrival_s
        burst.arrival_s = self._last_s
        if self._timer is None and self._is_open:
            self._arm()

    def set_open(self, *, is_open: bool) -> None:
        """Hold what is on its way, or let it go on."""
        self._is_open = is_open
        if not is_open:
            self._disarm()
        elif self._timer is None and self._bursts:
            self._arm()

    def hurry(self) -> None:
        """Deliver what is on its way now, unless the path is cut."""
        if self._is_open:
            for burst in self._bursts:
                burst.arrival_s = self._loop.time()
            self._disarm()
            self._deliver()

    def clear(self) -> None:
        """Lose what is on its way."""
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
    """Take one away; a key that is not there is the caller's mistake."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
