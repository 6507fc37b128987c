"""Requests of one frontend process: choose workers, stream tokens, survive the loss of workers.

Nothing here knows HTTP, so it runs over sockets, within a process and on virtual time.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec
from prometheus_client import CollectorRegistry

from penstock.core.errors import PenstockError, Unavailable
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.ids import WorkerId
from penstock.core.types.instances import CardFile, ModelCard, Role
from penstock.core.types.kv import KvAction, PrefixSummary
from penstock.core.types.load import ModelLoad, PeerCount, TenantCount
from penstock.core.types.requests import ExpandedPrompt, MediaPrompt, Request
from penstock.router.config import RouterConfig
from penstock.router.dispatch.open_request import OpenRequest, Siblings
from penstock.router.dispatch.operators import (
    FleetChanges,
    FleetKvActions,
    KvActed,
    StateChanged,
    WorkerRoleChanged,
)
from penstock.router.dispatch.state import DispatcherState, Journey
from penstock.router.explanations import RoutingExplanation
from penstock.router.fair_queue import retry_after_s
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.member import FleetMember, FleetWorkerView
from penstock.router.metrics import RouterMetrics
from penstock.router.request_queue import RequestQueue
from penstock.router.retries import RetryGuard
from penstock.router.router import Router
from penstock.router.summaries import Summaries
from penstock.seams import Discovery, RequestPlane, RequestStream

ANSWER_S_MAX = 1.0
PASSED_OVER_S = 10.0
"""A worker that did not answer, since it hangs or is of an older version, is asked again after this time."""


class TenantCounting:
    """Asks the connected worker with the lowest id. One event loop owns it."""

    def __init__(self) -> None:
        self._passed_over_s: dict[WorkerId, float] = {}  # by worker: until when

    async def count(
        self, counts: Mapping[str, TenantCount], members: Iterable[FleetMember | None]
    ) -> Mapping[str, PeerCount]:
        """Tell what this frontend's tenants have used, and return what they have used at others.

        Raises:
            Unavailable: no worker is there, or the one asked does not count or answer; the next call asks another one.
        """
        now_s = asyncio.get_running_loop().time()
        self._passed_over_s = {
            each: until_s for each, until_s in self._passed_over_s.items() if until_s > now_s
        }
        there = [
            member
            for member in members
            if member is not None
            and member.listed
            and member.connection is not None
            and member.worker_id not in self._passed_over_s
        ]
        if not there:
            raise Unavailable("no worker is connected that counts what tenants use")
        member = min(there, key=lambda each: each.worker_id)
        assert member.connection is not None, "chosen so"
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await member.connection.count_tenants(counts)
        except (PenstockError, TimeoutError) as error:
            self._passed_over_s[member.worker_id] = now_s + PASSED_OVER_S
            raise Unavailable(
                f"worker {member.instance.name} has not counted what tenants use: {str(error) or f'no answer within {ANSWER_S_MAX:g} s'}"
            ) from error


class Dispatcher:
    """A `seams.RequestDispatcher`. It works while its context is entered; one event loop owns it."""

    def __init__(
        self,
        discovery: Discovery,
        plane: RequestPlane,
        *,
        rng: random.Random,
        config: RouterConfig | None = None,
        hash_key: bytes = DEFAULT_KEY,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Connect to no worker yet.

        Args:
            discovery: says which workers there are; its owner closes it.
            plane: connects to them.
            rng: for jitter and the first turn.
            config: policy and bounds.
            hash_key: the deployment's, for the blocks of requests that move.
            registry: where the metrics go; None for nowhere.
        """
        config = config or RouterConfig()
        metrics = RouterMetrics(registry)
        fleet = Fleet(discovery, plane, config=config, metrics=metrics, rng=rng)
        self._shared = DispatcherState(
            config=config,
            fleet=fleet,
            router=Router(fleet, config, metrics=metrics, rng=rng),
            request_queue=RequestQueue(fleet, config.queue, metrics),
            retry_guard=RetryGuard(config.retries, config.migrations, metrics=metrics, rng=rng),
            metrics=metrics,
            hash_key=hash_key,
        )
        self._summaries = Summaries(fleet, config.prefix_summary, hash_key=hash_key, rng=rng)
        self._shared.router.on_routed = self._summaries.note
        self._worker_changes = FleetChanges(fleet)
        self._kv_actions = FleetKvActions(fleet)
        self._tenant_counting = TenantCounting()
        self._group = asyncio.TaskGroup()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._running = self._group.create_task(self._shared.fleet.run(), name="fleet")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is still open with `Unavailable`, and every connection."""
        for request in tuple(self._shared.requests.values()):
            request.fail(
                Unavailable("the frontend is shutting down; send the request again", retry_after_s=1.0)
            )
        assert self._running is not None, "entered before"
        self._running.cancel()
        if isinstance(
            error, asyncio.CancelledError
        ):  # perhaps because the fleet's task died: the group knows
            await self._group.__aexit__(kind, error, trace)
        else:
            await self._group.__aexit__(None, None, None)

    def open(self, request: Request, *, beside: RequestStream | None = None) -> OpenRequest:
        """Prepare a request. Entering its context sends it, leaving cancels it.

        Missing block hashes are computed. Requests opened `beside` each other share one prompt, which is computed once.
        """
        siblings = beside.siblings.beside(beside) if isinstance(beside, OpenRequest) else Siblings()
        return OpenRequest(self._shared, request, siblings)

    def models(self) -> Mapping[str, ModelCard]:
        """Name the models and adapters that at least one ready worker serves now."""
        return self._shared.fleet.models()

    def expects(self, name: str) -> bool:
        """Say whether a worker that is listed, and cannot take requests now, serves this model or adapter."""
        return self._shared.fleet.expects(name)

    def load(self, model: str) -> ModelLoad | None:
        """Sum the load of a model's ready workers, and what waits in this router for one; None without any."""
        fleet = self._shared.fleet
        pool = fleet.pools.get(model)
        if pool is None or not pool.has_ready:
            return None
        load, queued = pool.load(fleet.loads), self._shared.request_queue.num_queued_for(model)
        return msgspec.structs.replace(load, waiting_requests=load.waiting_requests + queued)

    def expect_link(self, worker: str, region: str, frontends: int) -> None:
        """Count a link to another region as one that has reached nothing, until it reports."""
        self._shared.metrics.links.expect(worker, region, frontends)

    def prefix_summary(
        self, model: str, cache_salt: str, after: Mapping[int, int], interval_s: float
    ) -> PrefixSummary | None:
        """Tell another region of the prefixes that workers here hold; see `Summaries.summary`."""
        return self._summaries.summary(model, cache_salt, after, interval_s)

    def retry_after_s(self) -> float:
        """Predict the seconds until all queued requests have left."""
        return retry_after_s(self._shared.request_queue.drain_s(asyncio.get_running_loop().time()))

    def queued(self) -> tuple[int, float]:
        """Give (requests that wait in the router, seconds that the oldest of them has waited)."""
        queue = self._shared.request_queue
        return queue.num_queued, queue.oldest_wait_s(asyncio.get_running_loop().time())

    async def looked(self) -> None:
        """Wait until discovery has listed the workers, and a connection to each was tried once."""
        await self._until(lambda: self._shared.fleet.has_looked)

    async def serving(self) -> None:
        """Wait until at least one worker is ready."""
        await self._until(lambda: bool(self.models()))

    async def _until(self, holds: Callable[[], bool]) -> None:
        changed = asyncio.Event()
        with self._shared.fleet.changes.telling(changed.set):
            while not holds():
                changed.clear()
                await changed.wait()

    async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
        """Fetch one of the card's files from any worker that has it.

        Raises:
            Unavailable: no worker answered.
        """
        return await self._shared.fleet.fetch_file(card, file)

    async def expand_media(self, card: ModelCard, prompt: MediaPrompt) -> ExpandedPrompt:
        """Have the engine of one of the model's workers expand the media of a prompt.

        Raises:
            RequestError: the engine does not take them.
            Unavailable: no worker answered.
        """
        return await self._shared.fleet.expand_media(card, prompt)

    async def count_tenants(self, counts: Mapping[str, TenantCount]) -> Mapping[str, PeerCount]:
        """Tell other frontends what tenants have used here, and return what they have used there; see `TenantCounting`."""
        return await self._tenant_counting.count(counts, self._shared.fleet.slots.now())

    def workers(self) -> Sequence[FleetWorkerView]:
        """Describe every known worker; for people."""
        return self._shared.fleet.workers()

    def explain(self, request_id: str) -> Sequence[RoutingExplanation]:
        """Explain the decisions about a request, oldest first; empty where they are not known."""
        return self._shared.router.decisions.of(request_id)

    def latest_decisions(self, most: int) -> Sequence[RoutingExplanation]:
        """Explain the latest routing decisions, oldest first."""
        return self._shared.router.decisions.latest(most)

    def journeys(self, answer_id: str) -> Sequence[Journey]:
        """Describe the way of a request, or of all choices of an answer; empty where it is not known."""
        shared, now_s = self._shared, asyncio.get_running_loop().time()
        return shared.journeys.of(answer_id, (each.journey() for each in shared.requests.values()), now_s)

    def latest_journeys(self, most: int) -> Sequence[Journey]:
        """Describe the ways of the latest requests: those under way first, then the newest that have ended."""
        shared, now_s = self._shared, asyncio.get_running_loop().time()
        return shared.journeys.latest(
            most, (each.journey() for each in reversed(shared.requests.values())), now_s
        )

    async def act_on_kv(self, action: KvAction, worker: str | None) -> Sequence[KvActed]:
        """Act on workers' KV caches; see `FleetKvActions`."""
        return await self._kv_actions.act(action, worker)

    async def change_role(self, worker: str, role: Role) -> WorkerRoleChanged:
        """Have a worker become one of another role; see `FleetChanges`."""
        return await self._worker_changes.change_role(worker, role)

    async def sleep(self, worker: str, level: int) -> StateChanged:
        """Have a worker drain and give up its memory; see `FleetChanges`."""
        return await self._worker_changes.sleep(worker, level)

    async def wake_up(self, worker: str) -> StateChanged:
        """Have a worker that sleeps take requests again; see `FleetChanges`."""
        return await self._worker_changes.wake_up(worker)

    def check(self) -> None:
        """Raise AssertionError where the parts disagree; for tests and simulations."""
        shared = self._shared
        shared.fleet.check()
        shared.router.check()
        shared.retry_guard.check()
        shared.request_queue.check()
        self._summaries.check()
        in_fleet = sum(view.open_requests for view in shared.fleet.workers())
        at_most = 2 * len(shared.requests)  # on a prefill and on a decode worker
        assert in_fleet <= at_most, f"{in_fleet} requests are sent, {len(shared.requests)} open"
