"""Regions that are workers of each other, simulated: what prefixes crossing as a summary are worth, and a region that is lost."""

import argparse
import asyncio
import math
import random
import time
from bisect import bisect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl

import msgspec
import numpy as np

from benchmarks.runner import Cache, Figures, Runner, default_jobs, expect_at_least
from penstock.bench.report import BenchReport
from penstock.core import log, wire
from penstock.core.errors import PenstockError, StepFailed, Unavailable
from penstock.core.hashing import root_hash
from penstock.core.ids import RequestId
from penstock.core.types.instances import Location, Role
from penstock.core.types.kv import pack_root
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import PackedHashes, PackedTokens, token_list
from penstock.engine.openai.apis.api import AnswerPiece
from penstock.engine.openai.apis.completions import Completions
from penstock.engine.openai.config import HealthConfig, ServerConfig
from penstock.engine.openai.connection import NotThere
from penstock.engine.openai.engine import ServerEngine, Serving
from penstock.engine.openai.server import ModelAtServer, ServerLoad, deployment_load
from penstock.frontend.limits.regions import PrefixQuery
from penstock.graph import Overrides, load
from penstock.router.config import PrefixSummaryConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.cluster import ClusterSpec, SimCluster, SimEngine
from penstock.sim.deployment import SALT, SimDeployment, plan_deployment
from penstock.sim.engine_timing import HostPace
from penstock.sim.loop import run as run_simulated
from penstock.sim.simulate import _rare_collections
from penstock.sim.workload import SimPrompt, named, named_units

_UNIT_TOKENS = 64
_SWING = 0.8


@dataclass(frozen=True, slots=True)
class Traffic:
    """A day of `day_s` seconds.

    rate_per_s:      of each region, mean over the day; at its peak 1.8 times as many, at night 0.2
    documents:       that all regions ask about, and as many that each region asks about alone
    zipf:            exponent of their popularity
    document_tokens: shared by all questions about one
    question_tokens: after it
    output_tokens:   of an answer
    """

    regions: int
    day_s: float
    rate_per_s: float
    documents: int = 4000
    zipf: float = 0.9
    document_tokens: int = 12_288
    question_tokens: int = 512
    output_tokens: int = 64

    @property
    def prompt_tokens(self) -> int:
        return self.document_tokens + self.question_tokens


@dataclass(frozen=True, slots=True)
class Question:
    """A request of a region's client."""

    at_s: float
    region: int
    prompt: SimPrompt


def questions(traffic: Traffic, rng: random.Random) -> Iterator[Question]:
    """Give a day's questions in the order of time."""
    run = rng.getrandbits(62)
    weights = list(accumulate((rank + 1) ** -traffic.zipf for rank in range(traffic.documents)))
    units: dict[tuple[int, int], SimPrompt] = {}
    peak = traffic.rate_per_s * (1 + _SWING) * traffic.regions
    at_s, number = 0.0, 0
    while (at_s := at_s + rng.expovariate(peak)) < traffic.day_s:
        region = rng.randrange(traffic.regions)
        phase = 2 * math.pi * (at_s / traffic.day_s - region / traffic.regions)
        if rng.random() * (1 + _SWING) > 1 + _SWING * math.sin(phase):
            continue
        rank = bisect(weights, rng.random() * weights[-1])
        key = (region + 1 if rng.random() < 0.5 else 0, rank)
        if key not in units:
            names = named_units(named(run, 1, *key), traffic.document_tokens // _UNIT_TOKENS)
            units[key] = SimPrompt(0, names, _UNIT_TOKENS)
        number += 1
        yield Question(at_s, region, SimPrompt(named(run, 2, number), units[key].shared, _UNIT_TOKENS))


class Place(Protocol):
    """Another region: its router, and whether it answers at all."""

    name: str
    is_lost: bool

    @property
    def dispatcher(self) -> Dispatcher: ...


@dataclass(slots=True)
class Crossings:
    """What crossed by a link."""

    requests: int = 0
    summaries: int = 0
    summary_bytes: int = 0
    summary_cpu_s: float = 0.0
    """Of the process, to make the summaries; real time."""
    unanswered_s: list[float] = field(default_factory=list)
    """When requests were sent that a lost region did not answer."""
    peak_bytes_per_s: float = 0.0
    """Of one answer over the time since the one before."""

    def note(self, num_bytes: int, interval_s: float) -> None:
        """Count an answer."""
        self.summaries += 1
        self.summary_bytes += num_bytes
        self.peak_bytes_per_s = max(self.peak_bytes_per_s, num_bytes / max(interval_s, 1e-9))


class DistantServer:
    """Answers as `engine.openai.server.EngineServer` does. A region that is lost hangs: nothing says that it is gone.

    The way of a request and its answer is that between router and link. Opening a connection, and asking for load and
    prefixes, takes a round trip more.
    """

    def __init__(self, there: Place, model: str, *, round_trip_s: float, timeout_s: float) -> None:
        self.url = self.name = f"sim://{there.name}"
        self.connection = self
        self.api = Completions(model, "penstock")
        self.crossings = Crossings()
        self._there = there
        self._model = model
        self._round_trip_s, self._timeout_s = round_trip_s, timeout_s

    async def check(self) -> ModelAtServer:
        load = await self._deployment_load()
        if load.workers < 1:
            raise Unavailable(f"{self.url}: no worker of its own serves now")
        return ModelAtServer(self._model, None, "penstock")

    async def try_out(self, served: ModelAtServer) -> None:
        del served
        await self._way()

    async def load(self) -> ServerLoad:
        return await self._deployment_load()

    async def get(self, path: str, *, timeout_s: float, bytes_max: int | None = None) -> bytes:
        """Answer `/prefixes` as a frontend does."""
        del timeout_s
        await self._way()
        asked = PrefixQuery.read(dict(parse_qsl(path.partition("?")[2])))
        begun_s = time.process_time()
        summary = self._there.dispatcher.prefix_summary(asked.model, "", asked.after, asked.interval_s)
        self.crossings.summary_cpu_s += time.process_time() - begun_s
        if summary is None:
            raise NotThere(f"{self.url}{path}: 404")
        content = wire.encode(summary)
        assert bytes_max is None or len(content) <= bytes_max, f"{len(content)} bytes of {bytes_max}"
        self.crossings.note(len(content), asked.interval_s)
        return content

    @asynccontextmanager
    async def answer(
        self, request: Request, extra: dict[str, Any], on_sent: Callable[[], None]
    ) -> AsyncIterator[AsyncIterator[AnswerPiece]]:
        del extra
        yield self._pieces(request, on_sent)

    async def close(self) -> None: ...

    async def _deployment_load(self) -> ServerLoad:
        await self._way()
        load = self._there.dispatcher.load(self._model)
        if load is None:
            raise Unavailable(f"{self.url}: no worker of its own serves now")
        return deployment_load(load)

    async def _way(self) -> None:
        await asyncio.sleep(self._round_trip_s)
        if self._there.is_lost:
            await asyncio.sleep(self._timeout_s)
            raise Unavailable(f"{self.url}: no answer within {self._timeout_s:g} s")

    async def _pieces(self, request: Request, on_sent: Callable[[], None]) -> AsyncIterator[AnswerPiece]:
        await asyncio.sleep(self._round_trip_s)
        on_sent()
        try:
            await self._until_found()
            self.crossings.requests += 1
            forwarded = msgspec.structs.replace(request, is_forwarded=True)
            async with self._there.dispatcher.open(forwarded) as stream:
                async for delta in stream:
                    yield AnswerPiece(
                        token_ids=tuple(token_list(delta.token_ids)),
                        finish_reason=delta.finish_reason,
                        cached_tokens=delta.cached_tokens,
                        is_last=delta.finish_reason is not None,
                    )
        except PenstockError as error:
            await self._until_found()
            raise StepFailed(error.message) from error

    async def _until_found(self) -> None:
        """Wait for ever where the region is lost: a request there ends by its link's doubts."""
        if self._there.is_lost:
            self.crossings.unanswered_s.append(asyncio.get_running_loop().time())
            await asyncio.Event().wait()


class RegionLink(ServerEngine):
    """The real engine of a link, as a simulated cluster takes it."""

    pool = kv = None

    def check(self) -> None:
        """Nothing of its own can be inconsistent."""

    def so_far(self) -> None:
        """It delivers at once."""


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
        spec = world.deployment.cluster_spec(cast("Mapping[RequestId, SimPrompt]", world.streams))
        usual = spec.workers[Role.AGGREGATED]

        def make_engine(pace: HostPace) -> SimEngine:
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
        deployment: SimDeployment,
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
        self.streams: dict[RequestId, SimPrompt] = {}
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

    def _request(self, number: int, prompt: SimPrompt) -> Request:
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


GRAPH = Path("examples/graphs/70b-h100-tp4-x4.yaml")
REGIONS = 3
FEDERATIONS = {
    "alone": Federation(links=False),
    "summary_64k": Federation(bytes_per_s=64_000),
    "load": Federation(),
    "summary_1k": Federation(bytes_per_s=1000),
    "in_turn": Federation(links=False, in_turn=True),
    "summary_1m": Federation(bytes_per_s=1_000_000),
    "summary_8k": Federation(bytes_per_s=8000),
}
_SEED = 1
_DECISIONS, _BATCH = 400, 50


@dataclass(frozen=True, slots=True)
class Size:
    """A run: `workers` in each region, `per_worker_s` requests to each a second, and a lost region for a part of the day."""

    workers: int
    per_worker_s: float
    day_s: float
    documents: int
    lost_from: float = 0.4
    lost_until: float = 0.7

    @property
    def traffic(self) -> Traffic:
        return Traffic(
            REGIONS,
            self.day_s,
            self.per_worker_s * self.workers,
            documents=self.documents,
            document_tokens=24_576,
        )

    @property
    def loss(self) -> Loss:
        return Loss(REGIONS - 1, self.lost_from * self.day_s, self.lost_until * self.day_s)


_WHOLE = Size(workers=1000, per_worker_s=0.17, day_s=64.0, documents=5000)
_QUICK = Size(workers=20, per_worker_s=0.17, day_s=64.0, documents=100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="of each region (default 1000)")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), metavar="N", help="runs at once (default: one a core)"
    )
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="keep finished runs here, and go on from it"
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Simulate each way to help each other.

    Raises:
        ConfigError: an option is wrong.
    """
    size = _QUICK if options.quick else _WHOLE
    if options.workers is not None:
        expect_at_least(options, workers=2)
        documents = max(size.documents * options.workers // size.workers, 1)
        size = Size(options.workers, size.per_worker_s, size.day_s, documents)
    expect_at_least(options, jobs=1)
    figures: dict[str, float] = {}
    with Runner(options.jobs, Cache(options.state)) as runner:
        for day, found in runner.run_many([Day(name, size) for name in FEDERATIONS]):
            figures |= {f"{day.name}_{key}": value for key, value in found.items()}
    return BenchReport(
        name="regions",
        config={
            **asdict(size),
            **asdict(size.traffic),
            "round_trip_s": ROUND_TRIP_S,
            "health": HEALTH.model_dump(),
            "clients_turned_s": TURNED_S,
            "graph": str(GRAPH),
            "quick": options.quick,
        },
        figures={key: figures[key] for key in sorted(figures)},
    )


@dataclass(frozen=True, slots=True)
class Day:
    """A job: one federation through the day."""

    name: str
    size: Size

    @property
    def key(self) -> str:
        return f"regions {self.name} {asdict(self.size)}"

    def __call__(self) -> Figures:
        return measure(self.name, self.size)


def measure(name: str, size: Size) -> dict[str, float]:
    """Run one federation, and give its figures."""
    log.configure("error", process="bench")
    settings = [
        f"roles.aggregated.replicas={size.workers}",
        "roles.aggregated.hardware=a100",
        f"router.workers_max={max(1024, size.workers + REGIONS)}",
        "router.indexed_blocks_max=200000000",
    ]
    deployment = plan_deployment(load(str(GRAPH), Overrides(settings)), beside=GRAPH.parent)
    worlds: list[_Measured] = []

    async def main(rng: random.Random) -> Outcome:
        worlds.append(_Measured(deployment, size.traffic, FEDERATIONS[name], rng, loss=size.loss))
        return await worlds[0].run()

    begun_s = time.perf_counter()
    with _rare_collections():
        outcome = run_simulated(main, _SEED)
    world = worlds[0]
    return {
        **_figures(outcome, size),
        **world.found,
        "crossed_share": world.crossed / max(len(outcome.ttft_s), 1),
        "wall_s": time.perf_counter() - begun_s,
    }


def _figures(outcome: Outcome, size: Size) -> dict[str, float]:
    ttft_s, sent_s = np.array(outcome.ttft_s), np.array(outcome.sent_s)
    regions, loss = np.array(outcome.regions), size.loss
    during = (sent_s >= loss.from_s) & (sent_s < loss.until_s)
    there = regions != loss.region
    return {
        "requests": len(ttft_s),
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "undisturbed_ttft_mean_s": float(ttft_s[sent_s < loss.from_s].mean()),
        "undisturbed_ttft_p99_s": float(np.percentile(ttft_s[sent_s < loss.from_s], 99)),
        "others_during_loss_ttft_p99_s": float(np.percentile(ttft_s[during & there], 99)),
        "turned_ttft_mean_s": float(ttft_s[during & ~there].mean()) if (during & ~there).any() else 0.0,
        "hit_ratio": sum(outcome.cached_tokens) / (len(ttft_s) * size.traffic.prompt_tokens),
        "lost": sum(outcome.lost.values()),
        "lost_at_the_lost_region": outcome.at_lost,
        "elsewhere_share": outcome.elsewhere / len(ttft_s),
    }


class _Measured(World):
    """A world whose routers and links are measured before they end."""

    found: dict[str, float]
    crossed = 0

    def at_end(self) -> None:
        super().at_end()
        crossings = [server.crossings for region in self.regions for server in region.all_servers]
        self.crossed = sum(each.requests for each in crossings)
        self.found = {}
        if not self.federation.links:
            return
        dispatcher = self.regions[0].dispatcher
        requests = [
            self._request(-1 - number, question.prompt)
            for number, question in zip(
                range(_DECISIONS), questions(self._traffic, random.Random(2)), strict=False
            )
        ]
        index = dispatcher._shared.fleet._indexer.regions
        stats = index._tree.stats()
        self.found = {
            "summary_bytes_per_s": mean(each.summary_bytes for each in crossings) / self._traffic.day_s,
            "summary_bytes_per_s_max": max(each.peak_bytes_per_s for each in crossings),
            "summary_cpu_ms": 1e3 * sum(each.summary_cpu_s for each in crossings)
            / max(sum(each.summaries for each in crossings), 1),
            "told_chunks": float(stats.pairs),
            "region_index_bytes": float(stats.num_bytes),
            "decision_us": _decision_us(dispatcher, requests, links=True),
            "decision_without_links_us": _decision_us(dispatcher, requests, links=False),
        }  # fmt: skip


def _decision_us(dispatcher: Dispatcher, requests: list[Request], *, links: bool) -> float:
    """Give the median batch's microseconds of pricing a request on all workers."""
    router = dispatcher._shared.router
    pool = dispatcher._shared.fleet.pools[requests[0].model]
    kept = set(pool._deployments)
    if not links:
        pool._deployments.clear()
    batches_us = []
    for first in range(0, len(requests), _BATCH):
        begun_s = time.process_time()
        for request in requests[first : first + _BATCH]:
            router.score(request)
        batches_us.append(1e6 * (time.process_time() - begun_s) / _BATCH)
    pool._deployments |= kept
    return median(batches_us)
