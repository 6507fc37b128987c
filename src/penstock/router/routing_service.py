"""The router alone, for gateways that send requests themselves: it names a server and gets feedback.

Any server with a prefix cache will do; nothing is sent to servers. The router predicts what they hold from earlier choices
(`indexer.Predictions`), unless a watcher follows their KV events, and their load from requests without a final feedback.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import pydantic
from prometheus_client import CollectorRegistry

from penstock.core.config import Config, wrong
from penstock.core.errors import Overloaded, PenstockError, RequestError, Unavailable, WorkerLost
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.types.instances import Instance, ModelCard, request_salt
from penstock.core.types.requests import Delta, Request, SamplingParams
from penstock.core.wire import TokenArray, pack_hashes, pack_tokens
from penstock.router.candidates import RoutePlan, WorkerRoute
from penstock.router.config import RouterConfig
from penstock.router.dispatch.attempt import RoutedRequest
from penstock.router.explanations import RoutingExplanation
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.member import FleetWorkerView
from penstock.router.gateway import (
    COUNT_MAX,
    GatewayServer,
    PrefillChoice,
    Query,
    RequestStage,
    ServerChoice,
    check_server,
    check_targets,
    tokens_of,
)
from penstock.router.metrics import RouterMetrics
from penstock.router.router import Router
from penstock.router.servers import ReportPlane, Servers, Watched
from penstock.runtime.discovery.view import MemoryDiscovery


class _Silent:
    """A `DeltaHandler` of servers that answer the gateway: only losses come."""

    def on_delta(self, delta: Delta) -> None:
        raise AssertionError(f"servers send nothing here, got {delta}")

    def on_lost(self, error: WorkerLost, *, alone: bool) -> None:
        """Keep the request until its feedback comes."""


_SILENT = _Silent()


@dataclass(slots=True, eq=False)
class _Open:
    """One request; `prefill` is None without a prefill server, and once that has answered."""

    model: str
    decode: RoutedRequest
    prefill: RoutedRequest | None
    heard_s: float
    is_compared: bool = False


class OpenRequests:
    """Reserves load for requests, and releases it by their feedback. One event loop owns it."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, *, block_size: int, silence_s: float) -> None:
        """Know none; a request without feedback for `silence_s` is taken to be over."""
        self.on_end: Callable[[str, bool], None] = lambda _name, _failed: None
        """Called with (server's name, whether the server failed) when feedback ends a request, or its prefill, there."""
        self._fleet = fleet
        self._metrics = metrics
        self._block_size = block_size
        self._silence_s = silence_s
        self._open: OrderedDict[RequestId, _Open] = OrderedDict()  # latest heard of last
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, request: Request, plan: RoutePlan) -> None:
        """Count a request at the servers of its plan."""
        now_s = asyncio.get_running_loop().time()
        prefill = None if plan.prefill is None else self._route(request, plan.prefill)
        decode = self._route(request, plan.decode)
        self._open[request.request_id] = _Open(request.model, decode, prefill, now_s)
        self._set_timer()

    def feedback(
        self,
        request_id: RequestId,
        stage: RequestStage,
        *,
        worker: str | None,
        cached_tokens: int | None,
        output_tokens: int | None,
    ) -> None:
        """Take feedback, as `RoutingService.feedback` has it.

        Raises:
            RequestError: a field is wrong, or no such request is open (404).
        """
        for name, tokens in (("cached_tokens", cached_tokens), ("output_tokens", output_tokens)):
            if tokens is not None and not 0 <= tokens <= COUNT_MAX:
                raise RequestError(f"{name}: must be >= 0 and <= {COUNT_MAX}, got {tokens}", param=name)
        open_ = self._open.get(request_id)
        if open_ is None:
            raise RequestError(
                f"id: no request {request_id!r} is open; it has finished, was silent for {self._silence_s:g} s, or"
                " another router named its worker",
                http_status=404,
                param="id",
            )
        names = [
            routed.member.instance.name for routed in (open_.decode, open_.prefill) if routed is not None
        ]
        if worker is not None and worker not in names:
            raise RequestError(
                f"worker: must be a worker that has this request, {' or '.join(names)}, got {worker!r}",
                param="worker",
            )
        open_.heard_s = asyncio.get_running_loop().time()
        self._open.move_to_end(request_id)
        if cached_tokens is not None and not open_.is_compared:
            self._compare(open_, cached_tokens)
        if stage in {RequestStage.PREFILLED, RequestStage.FIRST_TOKEN}:
            self._prefilled(open_)
        if stage == RequestStage.FIRST_TOKEN:
            open_.decode.prefill_done()
        elif stage in {RequestStage.FINISHED, RequestStage.FAILED}:
            if output_tokens is not None:
                self._fleet.pools[open_.model].traffic.ended(output_tokens, open_.heard_s)
            self._close(request_id, str(stage))
            is_failed = stage == RequestStage.FAILED
            for name in [worker or open_.decode.member.instance.name] if is_failed else names:
                self.on_end(name, is_failed)

    def check(self) -> None:
        """Raise AssertionError where the order, the timer or the fleet's counts disagree."""
        heard = [open_.heard_s for open_ in self._open.values()]
        assert heard == sorted(heard), "open: the latest heard of last"
        assert not self._open or self._timer is not None, "a timer runs while requests are open"
        held = len(self._open) + sum(open_.prefill is not None for open_ in self._open.values())
        in_fleet = sum(view.open_requests for view in self._fleet.workers())
        assert in_fleet == held, f"{in_fleet} requests are with workers, {held} open"

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _route(self, request: Request, route: WorkerRoute) -> RoutedRequest:
        return RoutedRequest(self._fleet, route, request, _SILENT, tenant=request.tenant)

    def _compare(self, open_: _Open, cached_tokens: int) -> None:
        """Count how many of the tokens guessed to be cached were cached."""
        open_.is_compared = True
        (open_.prefill or open_.decode).compare(cached_tokens, self._block_size, self._metrics)
        self._metrics.cached_tokens.inc(cached_tokens)

    def _prefilled(self, open_: _Open) -> None:
        prefill, open_.prefill = open_.prefill, None
        if prefill is not None:
            prefill.release()
            self.on_end(prefill.member.instance.name, False)

    def _close(self, request_id: RequestId, outcome: str) -> None:
        open_ = self._open.pop(request_id)
        self._metrics.ended(outcome).inc()
        for routed in (open_.decode, open_.prefill):
            if routed is not None:
                routed.release()

    def _set_timer(self) -> None:
        if self._timer is None and self._open:
            oldest = next(iter(self._open.values()))
            at_s = oldest.heard_s + self._silence_s
            self._timer = asyncio.get_running_loop().call_at(at_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._open:
            request_id, open_ = next(iter(self._open.items()))
            if open_.heard_s + self._silence_s > now_s:
                break
            self._close(request_id, "silent")
        self._set_timer()


_SAMPLING = SamplingParams(max_tokens=1)  # of no interest here
_TEXT_UNIT_BYTES = 4
_OF_DISPATCHERS = ("queue", "retries", "no_worker_wait_s", "connect_timeout_s", "reconnect_s_max")
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
        self._rng = rng
        self._metrics = RouterMetrics(registry or CollectorRegistry())
        discovery, plane, router = MemoryDiscovery(), ReportPlane(), self.config.router
        self._fleet = Fleet(discovery, plane, config=router, metrics=self._metrics, rng=rng)
        self._router = Router(self._fleet, router, metrics=self._metrics, rng=rng)
        self.servers = Servers(
            self._fleet,
            plane,
            discovery,
            servers_max=router.workers_max,
            block_size=self.config.block_size,
        )
        self.open = OpenRequests(
            self._fleet, self._metrics, block_size=self.config.block_size, silence_s=self.config.silence_s
        )
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
        self.open.close()
        self._running.cancel()
        self._running = None
        await self._group.__aexit__(None, None, None)

    async def put(self, name: str, server: GatewayServer, watched: Watched | None = None) -> FleetWorkerView:
        """Add or update a server; another URL, model or role under the same name is another server.

        Args:
            name: of the server.
            server: what a gateway says of it.
            watched: what its watcher knows besides; None: a gateway describes it, and nobody watches.

        Raises:
            RequestError: a field is invalid, or a watched server has this name (409).
            Overloaded: `router.workers_max` servers are known.
            PenstockError: called outside of the service's context.
        """
        if self._running is None:
            raise PenstockError("the routing service is not open; use it within `async with`")
        check_server(server)
        if watched is None:
            self.servers.refuse_watched(name)
        return await self.servers.put(name, server, watched)

    async def remove(self, name: str) -> None:
        """Remove a server that a gateway described; its requests stay open until their feedback.

        Raises:
            RequestError: there is none of this name (404), or it is watched (409).
        """
        self.servers.refuse_watched(name)
        await self.servers.remove(name)

    def workers(self) -> Sequence[FleetWorkerView]:
        """Describe every server, including removed ones with open requests."""
        return self._fleet.workers()

    def route(self, query: Query) -> ServerChoice:
        """Choose a server for a request, and count the request there until its feedback.

        Raises:
            RequestError: the prompt is empty or no prompt, a target is none, or no server has this model (404).
            Overloaded: too many requests are open.
            Unavailable: no server of the model may get it now.
        """
        if len(self.open) >= self.config.router.open_requests_max:
            raise Overloaded(
                f"{len(self.open)} requests are open, the limit (router.open_requests_max); send feedback when one has"
                " finished",
                retry_after_s=1.0,
            )
        request = self._request(query, self._card_of(query.model))
        known = [self.servers.worker_id(name) for name in query.exclude]
        excluded = {worker_id for worker_id in known if worker_id is not None}
        self._router.arrived(request)
        plan = self._router.plan(request, exclude=excluded)
        if plan is None:
            raise Unavailable(
                f"model {query.model!r}: none of its workers may get this request: all are draining, removed or excluded",
                retry_after_s=1.0,
            )
        decode = self._instance(plan.decode)
        if plan.prefill is None and decode.engine.transferred_prompts_only:
            raise Unavailable(
                f"model {query.model!r}: no prefill worker may get this request, and its decode workers compute no prompts",
                retry_after_s=1.0,
            )
        self.open.begin(request, plan)
        choice = ServerChoice(id=request.request_id, worker=decode.name, url=decode.address)
        if plan.prefill is None:
            return choice
        prefill = self._instance(plan.prefill)
        transfer = self.servers.transfer(prefill.name)
        return msgspec.structs.replace(
            choice,
            fields=transfer.decode,
            prefill=PrefillChoice(
                worker=prefill.name,
                url=prefill.address,
                fields=transfer.prefill,
                from_answer=transfer.from_answer,
            ),
        )

    def feedback(
        self,
        request_id: str,
        stage: RequestStage,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        worker: str | None = None,
    ) -> None:
        """Take feedback on a request.

        Args:
            request_id: the choice's.
            stage: what it has reached.
            cached_tokens: prompt tokens that the server had cached, where it says so; counted once.
            output_tokens: of the answer that has finished, for what the policy expects of the next.
            worker: which of the request's servers has failed; None: the one that answers.

        Raises:
            RequestError: a count is below 0 or absurd, the worker has not this request, or there is no such stage or request, or
                not any more (404).
        """
        if stage not in tuple(RequestStage):
            raise RequestError(
                f"stage: must be one of {', '.join(RequestStage)}, got {stage!r}", param="stage"
            )
        self.open.feedback(
            RequestId(request_id),
            stage,
            worker=worker,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
        )

    def explain(self, request_id: str) -> Sequence[RoutingExplanation]:
        """Explain the choice for a request; empty where it is not known."""
        return self._router.decisions.of(request_id)

    def latest_decisions(self, most: int) -> Sequence[RoutingExplanation]:
        """Explain the latest decisions, oldest first."""
        return self._router.decisions.latest(most)

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        self._fleet.check()
        self._router.check()
        self.open.check()

    def _instance(self, route: WorkerRoute) -> Instance:
        return self._fleet.slots.at(route.slot).instance

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

    def _request(self, query: Query, card: ModelCard) -> Request:
        check_targets(query)
        if isinstance(query.prompt, str):
            units, salt = _units(query.prompt), card.salt + b"|text"
        else:
            units, salt = tokens_of(query.prompt), card.salt
        salt = request_salt(salt, query.cache_salt)
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


def _units(text: str) -> TokenArray:
    """Cut text into what stands for tokens: four bytes of UTF-8 each, the last one filled up with zeros."""
    data = text.encode(errors="surrogatepass")
    return np.frombuffer(data + bytes(-len(data) % _TEXT_UNIT_BYTES), dtype="<i4")
