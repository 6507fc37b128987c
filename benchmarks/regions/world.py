"""Three regions on one virtual clock: a cluster, a router and a link to each other region in each."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from benchmarks.regions.link import DistantServer, RegionLink
from benchmarks.regions.traffic import Question, Traffic, questions
from penstock.core.errors import PenstockError
from penstock.core.hashing import root_hash
from penstock.core.ids import RequestId
from penstock.core.types.instances import Location, Role
from penstock.core.types.kv import pack_root
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import PackedHashes, PackedTokens
from penstock.engine.openai.config import HealthConfig, ServerConfig
from penstock.engine.openai.engine import Serving
from penstock.router.config import PrefixSummaryConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.deployment import SALT, Deployment
from penstock.sim.engine.timing import Pace
from penstock.sim.workload.prompt import Prompt
from penstock.sim.world.cluster import ClusterSpec, SimCluster, SimEngine

ROUND_TRIP_S = 0.08
HEALTH = HealthConfig(interval_s=0.5, timeout_s=1.0, retry_s_max=1.0)
TURNED_S = 5.0
"""Until clients of a lost region ask another one, and until they come back."""
_LINKS = 1 << 20
"""Numbers of links among the workers of a cluster begin here."""


@dataclass(frozen=True, slots=True)
class Federation:
    """How regions help each other.

    links:       whether each has the others as workers
    bytes_per_s: of the summary on each link; 0: none
    in_turn:     clients ask the regions in turn
    """

    links: bool = True
    bytes_per_s: int = 0
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """Region `region` is lost from `from_s` until `until_s`, and comes back with empty caches."""

    region: int
    from_s: float
    until_s: float


@dataclass(slots=True)
class Outcome:
    """What clients saw.

    ttft_s, cached_tokens: of each answered request, with the time at which it was sent and its region.
    lost: failed requests by the region of their clients; `at_lost` are those that were at the lost region itself.
    """

    sent_s: list[float] = field(default_factory=list)
    regions: list[int] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    lost: Counter[int] = field(default_factory=Counter)
    at_lost: int = 0
    elsewhere: int = 0


class Region:
    """One region: its cluster while it is there. One task keeps it."""

    def __init__(self, name: str, world: "World") -> None:
        self.name = name
        self.is_lost = False
        self.all_servers: list[DistantServer] = []
        """Of its links, those of before a loss included."""
        self._world = world
        self._cluster: SimCluster | None = None
        self._linking: DistantServer | None = None
        self._places: list[str] = []

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._cluster is not None, "it is there"
        return self._cluster.dispatchers[0]

    async def live(self, ready: asyncio.Event, ending: asyncio.Event) -> None:
        """Be there from now until `ending`."""
        world = self._world
        async with SimCluster(self._spec(), random.Random(world.rng.getrandbits(64))) as cluster:
            self._cluster = cluster
            for number in range(world.workers):
                await cluster.start(f"{self.name}-{number}")
            await cluster.dispatchers[0].serving()
            await asyncio.sleep(1.0)
            self.is_lost = False
            ready.set()
            await ending.wait()
            self.is_lost = True
        self._cluster = None

    def forget_links(self) -> None:
        """Number its links anew, as those of a cluster that has ended."""
        self._places.clear()

    async def link(self, there: "Region") -> None:
        """Have another region as a worker."""
        assert self._cluster is not None, "it is there"
        world = self._world
        self._linking = DistantServer(
            there,
            world.deployment.graph.model,
            round_trip_s=ROUND_TRIP_S,
            timeout_s=HEALTH.timeout_s,
        )
        self.all_servers.append(self._linking)
        self._places.append(there.name)
        await self._cluster.start(f"link-{there.name}", index=_LINKS + len(self._places) - 1)

    def _spec(self) -> ClusterSpec:
        """Give the cluster's spec, in which the next engine may be a link's."""
        world = self._world
        spec = world.deployment.cluster_spec(cast("Mapping[RequestId, Prompt]", world.streams))
        usual = spec.workers[Role.AGGREGATED]

        def make_engine(pace: Pace) -> SimEngine:
            server, self._linking = self._linking, None
            return usual.make_engine(pace) if server is None else world.link_engine(server)

        def location_of(number: int) -> Location:
            return Location(region=self.name if number < _LINKS else self._places[number - _LINKS])

        summary = PrefixSummaryConfig(bytes_per_s=world.federation.bytes_per_s)
        router = spec.router.model_copy(
            update={"location": Location(region=self.name), "prefix_summary": summary}
        )
        workers = {Role.AGGREGATED: replace(usual, make_engine=make_engine, location_of=location_of)}
        return replace(spec, router=router, workers=workers)


class World:
    """All regions and their clients."""

    def __init__(
        self,
        deployment: Deployment,
        traffic: Traffic,
        federation: Federation,
        rng: random.Random,
        *,
        loss: Loss | None = None,
    ) -> None:
        self.deployment = deployment
        self.workers = deployment.role_groups[0].spec.replicas
        self.federation = federation
        self.rng = rng
        self.streams: dict[RequestId, Prompt] = {}
        self.outcome = Outcome()
        self.regions = [Region(f"region-{index + 1}", self) for index in range(traffic.regions)]
        self._traffic = traffic
        self._loss = loss
        self._text = memoryview(bytes(4 * traffic.prompt_tokens))
        self.start_s = 0.0
        """When the day began."""

    async def run(self) -> Outcome:
        """Live through the day, and until the last answer has ended."""
        loop = asyncio.get_running_loop()
        sessions = random.Random(self.rng.getrandbits(64))
        async with asyncio.TaskGroup() as around:
            endings = [await self._begin(around, region) for region in self.regions]
            for region in self.regions:
                await self._connect(region)
            await asyncio.sleep(1.0)
            self.start_s = loop.time()
            losing = None
            if self._loss is not None:
                losing = around.create_task(self._lose(around, endings, self._loss))
            async with asyncio.TaskGroup() as clients:
                for number, question in enumerate(questions(self._traffic, sessions)):
                    wait_s = self.start_s + question.at_s - loop.time()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    clients.create_task(self._ask(number, question))
            if losing is not None:
                await losing
            self.at_end()
            for ending in endings:
                ending.set()
        return self.outcome

    def at_end(self) -> None:
        """Called before the regions end; measurements of routers go here."""
        for region in self.regions:
            region.dispatcher.check()

    def before_return(self, region: Region) -> None:
        """Called before a lost region comes back."""

    def link_engine(self, server: DistantServer) -> SimEngine:
        """Make the engine of a link."""
        graph, role = self.deployment.graph, self.deployment.role_groups[0]
        key = root_hash(graph.block_size, SALT)
        serving = Serving(
            block_size=graph.block_size,
            context_length=self.deployment.shape.context_length,
            vocab_size=1 << 20,
            max_running_requests=role.spec.max_running_requests or 256,
            max_waiting_requests=1024,
            max_batch_tokens=role.spec.max_batch_tokens or 8192,
            root=pack_root(key) if self.federation.bytes_per_s else b"",
        )
        config = ServerConfig(url=("http://distant",), health=HEALTH)
        return cast("SimEngine", RegionLink(cast("Any", server), config, serving))

    # -- regions

    async def _begin(self, group: asyncio.TaskGroup, region: Region) -> asyncio.Event:
        ready, ending = asyncio.Event(), asyncio.Event()
        group.create_task(region.live(ready, ending), name=region.name)
        await ready.wait()
        return ending

    async def _connect(self, region: Region) -> None:
        if self.federation.links:
            for other in self.regions:
                if other is not region and not other.is_lost:
                    await region.link(other)

    async def _lose(self, group: asyncio.TaskGroup, endings: list[asyncio.Event], loss: Loss) -> None:
        region = self.regions[loss.region]
        await asyncio.sleep(loss.from_s)
        endings[loss.region].set()
        region.is_lost = True
        await asyncio.sleep(loss.until_s - loss.from_s)
        self.before_return(region)
        region.forget_links()
        endings[loss.region] = await self._begin(group, region)
        await self._connect(region)

    # -- clients

    def _home(self, number: int, question: Question) -> tuple[int, float]:
        """Give the region that a client asks, and the seconds of the way there and back."""
        count, loss = len(self.regions), self._loss
        home = number % count if self.federation.in_turn else question.region
        if loss is not None and home == loss.region:
            turned = loss.from_s + TURNED_S <= question.at_s < loss.until_s + TURNED_S
            if turned:
                home = (home + 1 + number % (count - 1)) % count
        return home, 0.0 if home == question.region else ROUND_TRIP_S

    async def _ask(self, number: int, question: Question) -> None:
        loop, outcome = asyncio.get_running_loop(), self.outcome
        home, way_s = self._home(number, question)
        region = self.regions[home]
        request = self._request(number, question.prompt)
        sent_s, first_s = loop.time(), None
        was_lost = region.is_lost
        if way_s:
            await asyncio.sleep(way_s)  # to open a connection, and half of it for the request
        if region.is_lost:
            outcome.at_lost += 1
            return
        self.streams[request.request_id] = question.prompt
        try:
            async with region.dispatcher.open(request) as stream:
                async for delta in stream:
                    if first_s is None and delta.token_ids:
                        first_s = loop.time() + way_s
        except PenstockError:
            if was_lost or region.is_lost:
                outcome.at_lost += 1
            else:
                outcome.lost[question.region] += 1
            return
        finally:
            del self.streams[request.request_id]
        assert first_s is not None, "an answer has tokens"
        outcome.sent_s.append(question.at_s)
        outcome.regions.append(question.region)
        outcome.ttft_s.append(first_s - sent_s)
        outcome.cached_tokens.append(stream.cached_tokens)
        outcome.elsewhere += home != question.region

    def _request(self, number: int, prompt: Prompt) -> Request:
        graph, traffic = self.deployment.graph, self._traffic
        hashes = prompt.block_hashes(graph.block_size, 0, traffic.prompt_tokens // graph.block_size)
        return Request(
            request_id=RequestId(f"r{number}"),
            model=graph.model,
            token_ids=PackedTokens(self._text),  # type: ignore[arg-type]
            sampling=SamplingParams(max_tokens=traffic.output_tokens, ignore_eos=True),
            block_hashes=PackedHashes(hashes.tobytes()),
            salt=SALT,
        )
