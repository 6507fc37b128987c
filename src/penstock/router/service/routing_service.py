"""The router alone, for gateways that send requests themselves: it names a server and gets feedback.

Any server with a prefix cache will do; nothing is sent to servers. The router predicts what they hold from earlier choices
(`predictions.py`), and their load from requests without a final feedback.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import pydantic
from prometheus_client import CollectorRegistry

from penstock.core.config import Config, wrong
from penstock.core.errors import Overloaded, PenstockError, RequestError, Unavailable, WorkerLost
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.cards import ModelCard
from penstock.core.types.instances import EngineInfo, Instance, Role
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, Request, SamplingParams
from penstock.core.wire import TokenArray, pack_hashes, pack_tokens
from penstock.router.candidates import Route
from penstock.router.config import RouterConfig
from penstock.router.explain.explanation import Explanation
from penstock.router.fleet.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.router.router import Router
from penstock.router.service.gateway import (
    COUNT_MAX,
    Choice,
    Query,
    Server,
    Stage,
    check_server,
    check_targets,
    tokens_of,
)
from penstock.router.service.null_plane import NullPlane
from penstock.router.workers.loads import Reservation
from penstock.router.workers.member import WorkerView
from penstock.runtime.discovery.memory import MemoryDiscovery, MemoryRegistration

_ANY_LENGTH = np.iinfo(np.int32).max  # servers check lengths themselves
_BATCH_TOKENS = 8192  # a usual chunk of prefill
_SAMPLING = SamplingParams(max_tokens=1)  # of no interest here
_TEXT_UNIT_BYTES = 4
_NAMES_TOLD = 16
_OF_DISPATCHERS = ("queue", "retries", "disagg", "no_worker_wait_s", "connect_timeout_s", "reconnect_s_max")
"""Settings without effect here."""


class RoutingServiceConfig(Config):
    """Settings of the router alone."""

    router: RouterConfig = RouterConfig()
    """Policy, and bounds of everything kept."""
    block_size: int = pydantic.Field(default=16, ge=1)
    """Tokens in a block of the servers' prefix caches; of text, four bytes stand for a token."""
    silence_s: float = pydantic.Field(default=600.0, gt=0)
    """A request without feedback for so long is taken to be over."""

    @pydantic.field_validator("router")
    @classmethod
    def _check_router(cls, router: RouterConfig) -> RouterConfig:
        for name in _OF_DISPATCHERS:
            if getattr(router, name) != RouterConfig.model_fields[name].default:
                raise wrong(
                    f"{name} has no effect on the router alone, which names a server at once and sends nothing;"
                    " leave it out"
                )
        return router


@dataclass(slots=True, eq=False)
class _Routed:
    """A request under way; a `DeltaHandler` to which only losses come."""

    route: Route
    reservation: Reservation
    heard_s: float
    model: str
    is_compared: bool = False

    def on_delta(self, delta: Delta) -> None:
        raise AssertionError(f"servers send nothing here, got {delta}")

    def on_lost(self, error: WorkerLost, *, alone: bool) -> None:
        """Keep it until its feedback comes."""


class RoutingService:
    """Names servers while its context is entered. One event loop owns it."""

    def __init__(
        self,
        *,
        rng: random.Random,
        config: RoutingServiceConfig | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Know no server yet; `put` them.

        Args:
            rng: for ids and the first turn.
            config: policy, block size and bounds.
            registry: where the metrics go; None makes a registry.
        """
        self.config = config or RoutingServiceConfig()
        self.on_end: Callable[[str, bool], None] = lambda _name, _failed: None
        """Called with (server's name, whether the server failed) when feedback ends a request."""
        self._rng = rng
        self._metrics = RouterMetrics(registry or CollectorRegistry())
        self._discovery = MemoryDiscovery()
        router = self.config.router
        self._plane = NullPlane()
        self._fleet = Fleet(self._discovery, self._plane, config=router, metrics=self._metrics, rng=rng)
        self._router = Router(self._fleet, router, metrics=self._metrics, rng=rng)
        self._servers: dict[str, tuple[Instance, MemoryRegistration]] = {}
        self._numbers = count(1)
        self._open: OrderedDict[RequestId, _Routed] = OrderedDict()  # latest heard of last
        self._timer: asyncio.TimerHandle | None = None
        self._changing = asyncio.Lock()  # one change of the servers at a time
        self._group = asyncio.TaskGroup()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._running = self._group.create_task(self._fleet.run(), name="fleet")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._running is not None, "entered before"
        if self._timer is not None:
            self._timer.cancel()
        self._running.cancel()
        self._running = None
        await self._group.__aexit__(None, None, None)

    async def put(self, name: str, server: Server) -> WorkerView:
        """Add or update a server; another URL or model under the same name is another server.

        Raises:
            RequestError: a field is invalid.
            Overloaded: `router.workers_max` servers are known.
            PenstockError: called outside of the service's context.
        """
        if self._running is None:
            raise PenstockError("the routing service is not open; use it within `async with`")
        check_server(server)
        async with self._changing:
            return await self._put(name, server)

    async def _put(self, name: str, server: Server) -> WorkerView:
        known = self._servers.get(name)
        if known is not None and (known[0].address, known[0].card.name) != (server.url, server.model):
            await self._remove(name)
            known = None
        if known is None:
            limit = self.config.router.workers_max
            if len(self._fleet.workers()) >= limit:
                raise Overloaded(
                    f"{limit} workers are known, the limit (router.workers_max); remove one first"
                )
            instance = self._instance(WorkerId(next(self._numbers)), name, server)
            registration = await self._discovery.register(instance)
        else:
            instance, registration = self._instance(known[0].worker_id, name, server), known[1]
            await registration.update(instance)
        self._servers[name] = instance, registration
        return await self._shown(instance)

    async def note_problem(self, name: str, problem: str | None) -> None:
        """Give a server no requests while it has a problem; None: it serves again. An unknown name is ignored."""
        async with self._changing:
            if name in self._servers:
                instance, registration = self._servers[name]
                instance = msgspec.structs.replace(instance, problem=problem or "")
                await registration.update(instance)
                self._servers[name] = instance, registration
                await self._shown(instance)

    def note_load(self, name: str, running: int, waiting: int, kv_usage: float | None) -> None:
        """Note a server's own word of its load. What exceeds this router's requests there is other clients'.

        Args:
            name: of the server; an unknown one is ignored.
            running: requests in its batch.
            waiting: requests in its queue.
            kv_usage: share of its KV cache in use, 0 to 1; None: unknown.
        """
        if name not in self._servers:
            return
        instance = self._servers[name][0]
        slot = self._fleet.slot_of(instance.worker_id)
        ours = 0 if slot is None else self._fleet.loads.open_requests(slot)
        others = max(running + waiting - ours, 0)
        queued, total = min(others, waiting), instance.engine.total_blocks
        used = round(kv_usage * total) if others and kv_usage is not None else 0
        self._plane.report(
            instance.worker_id,
            WorkerLoad(
                running_requests=others - queued,
                waiting_requests=queued,
                active_blocks=used,
                total_blocks=total,
            ),
        )

    async def remove(self, name: str) -> None:
        """Remove a server; its requests stay open until their feedback.

        Raises:
            RequestError: there is none of this name (404).
        """
        async with self._changing:
            await self._remove(name)

    async def _remove(self, name: str) -> None:
        if name not in self._servers:
            names = sorted(self._servers)
            known = ", ".join(names[:_NAMES_TOLD]) + ", ..." * (len(names) > _NAMES_TOLD) or "none"
            raise RequestError(f"worker {name!r} is not known; known: {known}", http_status=404)
        instance, registration = self._servers.pop(name)
        await registration.close()
        changed = asyncio.Event()
        with self._fleet.changes.telling(changed.set):
            while any(v.worker_id == instance.worker_id and v.condition == "ready" for v in self.workers()):
                changed.clear()
                await changed.wait()

    def workers(self) -> Sequence[WorkerView]:
        """Describe every server, including removed ones with open requests."""
        return self._fleet.workers()

    def route(self, query: Query) -> Choice:
        """Choose a server for a request, and count the request there until its feedback.

        Raises:
            RequestError: the prompt is empty or no prompt, a target is none, or no server has this model (404).
            Overloaded: too many requests are open.
            Unavailable: no server of the model may get it now.
        """
        if len(self._open) >= self.config.router.open_requests_max:
            raise Overloaded(
                f"{len(self._open)} requests are open, the limit (router.open_requests_max); send feedback when one has"
                " finished",
                retry_after_s=1.0,
            )
        request = self._request(query, self._card_of(query.model))
        excluded = {self._servers[name][0].worker_id for name in query.exclude if name in self._servers}
        self._router.arrived(request.model)
        plan = self._router.plan(request, exclude=excluded)
        if plan is None:
            raise Unavailable(
                f"model {query.model!r}: none of its workers may get this request: all are draining, removed or excluded",
                retry_after_s=1.0,
            )
        route = plan.decode
        reservation = self._fleet.loads.reserve(
            route.slot, route.prefill_tokens, route.blocks, route.cached_tokens
        )
        routed = _Routed(route, reservation, asyncio.get_running_loop().time(), request.model)
        self._fleet.submit(route.slot, request, routed)
        self._open[request.request_id] = routed
        self._set_timer()
        instance = self._fleet.slots.at(route.slot).instance
        return Choice(id=request.request_id, worker=instance.name, url=instance.address)

    def feedback(
        self,
        request_id: str,
        stage: Stage,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Take feedback on a request.

        Args:
            request_id: the choice's.
            stage: what it has reached.
            cached_tokens: prompt tokens that the server had cached, where it says so; counted once.
            output_tokens: of the answer that has finished, for what the policy expects of the next.

        Raises:
            RequestError: a count is below 0 or absurd, or there is no such stage or request, or not any more (404).
        """
        if stage not in tuple(Stage):
            raise RequestError(f"stage: must be one of {', '.join(Stage)}, got {stage!r}", param="stage")
        for name, tokens in (("cached_tokens", cached_tokens), ("output_tokens", output_tokens)):
            if tokens is not None and not 0 <= tokens <= COUNT_MAX:
                raise RequestError(f"{name}: must be >= 0 and <= {COUNT_MAX}, got {tokens}", param=name)
        routed = self._open.get(RequestId(request_id))
        if routed is None:
            raise RequestError(
                f"id: no request {request_id!r} is open; it has finished, was silent for {self.config.silence_s:g} s, or"
                " another router named its worker",
                http_status=404,
                param="id",
            )
        routed.heard_s = asyncio.get_running_loop().time()
        self._open.move_to_end(RequestId(request_id))
        if cached_tokens is not None and not routed.is_compared:
            routed.is_compared = True
            guessed = routed.route.overlap_blocks * self.config.block_size
            self._metrics.predicted_hit_tokens.inc(guessed)
            self._metrics.predicted_hits_found_tokens.inc(min(guessed, cached_tokens))
            self._metrics.cached_tokens.inc(cached_tokens)
        if stage == Stage.FIRST_TOKEN:
            self._fleet.loads.prefill_done(routed.reservation)
        elif stage in {Stage.FINISHED, Stage.FAILED}:
            if output_tokens is not None:
                self._fleet.pools[routed.model].traffic.ended(output_tokens, routed.heard_s)
            name = self._fleet.slots.at(routed.route.slot).instance.name
            self._close(RequestId(request_id), str(stage))
            self.on_end(name, stage == Stage.FAILED)

    def explain(self, request_id: str) -> Sequence[Explanation]:
        """Explain the choice for a request; empty where it is not known."""
        return self._router.decisions.of(request_id)

    def latest_decisions(self, most: int) -> Sequence[Explanation]:
        """Explain the latest decisions, oldest first."""
        return self._router.decisions.latest(most)

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        self._fleet.check()
        self._router.check()
        heard = [routed.heard_s for routed in self._open.values()]
        assert heard == sorted(heard), "open: the latest heard of last"
        assert not self._open or self._timer is not None, "a timer runs while requests are open"
        in_fleet = sum(view.open_requests for view in self.workers())
        assert in_fleet == len(self._open), f"{in_fleet} requests are with workers, {len(self._open)} open"

    def _instance(self, worker_id: WorkerId, name: str, server: Server) -> Instance:
        size = self.config.block_size
        return Instance(
            worker_id=worker_id,
            name=name,
            address=server.url,
            role=Role.AGGREGATED,
            card=ModelCard(
                name=server.model, context_length=_ANY_LENGTH, block_size=size, salt=server.model.encode()
            ),
            engine=EngineInfo(
                block_size=size,
                total_blocks=server.total_blocks,
                context_length=_ANY_LENGTH,
                max_batch_tokens=_BATCH_TOKENS,
                max_running_requests=_ANY_LENGTH,
                kv_events=False,
            ),
            state=server.state,
            prices=server.prices,
            adapters=server.adapters,
            host=server.host,
            rack=server.rack,
            zone=server.zone,
            region=server.region,
        )

    def _card_of(self, model: str) -> ModelCard:
        """Find a model, also one whose workers may get no requests now, or an adapter.

        Raises:
            RequestError: no worker has it (404).
        """
        models = self._fleet.models()
        if model in models:
            return models[model]
        if model in self._fleet.pools:
            return self._fleet.pools[model].card
        for pool in self._fleet.pools.values():
            if model in pool.adapters:
                return pool.card.adapted(model)
        known = ", ".join(sorted({*models, *self._fleet.pools})) or "none"
        raise RequestError(f"model {model!r}: no worker has it; known: {known}", http_status=404)

    async def _shown(self, instance: Instance) -> WorkerView:
        """Wait until the fleet has taken in a server."""
        changed = asyncio.Event()
        with self._fleet.changes.telling(changed.set):
            while True:
                slot = self._fleet.slot_of(instance.worker_id)
                if slot is not None and self._fleet.slots.at(slot).instance == instance:
                    (view,) = (view for view in self.workers() if view.worker_id == instance.worker_id)
                    if view.connections:
                        return view
                changed.clear()
                await changed.wait()

    def _request(self, query: Query, card: ModelCard) -> Request:
        check_targets(query)
        if isinstance(query.prompt, str):
            units, salt = _units(query.prompt), card.salt + b"|text"
        else:
            units, salt = tokens_of(query.prompt), card.salt
        if not len(units):
            raise RequestError("the prompt is empty; give at least one token or character", param="prompt")
        return Request(
            request_id=RequestId(f"{self._rng.getrandbits(96):024x}"),
            model=card.parent or card.name,
            adapter=None if card.parent is None else card.name,
            token_ids=pack_tokens(units),
            sampling=_SAMPLING,
            block_hashes=pack_hashes(block_hashes(units, card.block_size, salt)),
            salt=salt,
            session=query.session,
            slo_ttft_s=query.slo_ttft_s,
            slo_itl_s=query.slo_itl_s,
        )

    def _close(self, request_id: RequestId, outcome: str) -> None:
        routed = self._open.pop(request_id)
        self._metrics.ended(outcome).inc()
        self._fleet.loads.release(routed.reservation)
        self._fleet.finished(routed.route.slot, request_id)

    def _set_timer(self) -> None:
        if self._timer is None and self._open:
            oldest = next(iter(self._open.values()))
            at_s = oldest.heard_s + self.config.silence_s
            self._timer = asyncio.get_running_loop().call_at(at_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        until_s = asyncio.get_running_loop().time() - self.config.silence_s
        while self._open:
            request_id, routed = next(iter(self._open.items()))
            if routed.heard_s > until_s:
                break
            self._close(request_id, "silent")
        self._set_timer()


def _units(text: str) -> TokenArray:
    """Cut text into what stands for tokens: four bytes of UTF-8 each, the last one filled up with zeros."""
    data = text.encode(errors="surrogatepass")
    return np.frombuffer(data + bytes(-len(data) % _TEXT_UNIT_BYTES), dtype="<i4")
