"""What all requests of one dispatcher share, and the errors that they end with."""

from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.errors import DeadlineExceeded, Overloaded, PenstockError, RequestError, Unavailable
from penstock.core.ids import RequestId
from penstock.core.types.requests import Request
from penstock.router.config import RouterConfig
from penstock.router.dispatch.journeys import Journey, Journeys
from penstock.router.dispatch.reader import ReadableRequests
from penstock.router.fleet.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.router.queue.fair_queue import retry_after_s
from penstock.router.queue.request_queue import RequestQueue
from penstock.router.retries.retry_guard import RetryGuard
from penstock.router.retries.retry_state import quarantined
from penstock.router.router import Router
from penstock.router.workers.member import Condition


class EndableRequest(Protocol):
    """An open request."""

    def fail(self, error: PenstockError) -> None: ...
    def journey(self) -> Journey: ...


@dataclass(slots=True)
class DispatcherState:
    """One dispatcher's parts; `requests` are open. One event loop owns it."""

    config: RouterConfig
    fleet: Fleet
    router: Router
    request_queue: RequestQueue
    retry_guard: RetryGuard
    metrics: RouterMetrics
    hash_key: bytes
    requests: dict[RequestId, EndableRequest] = field(default_factory=dict)
    journeys: Journeys = field(default_factory=Journeys)
    readable: ReadableRequests = field(default_factory=ReadableRequests)

    def admit(self, request: Request, now_s: float) -> None:
        """Refuse a request that may not be opened.

        Raises:
            Overloaded: too many are open.
            RequestError: its id is in use.
            Unavailable: its content is in quarantine.
        """
        if len(self.requests) >= self.config.open_requests_max:
            raise Overloaded(
                f"{len(self.requests)} requests are under way here, the limit (router.open_requests_max); try again later",
                retry_after_s=retry_after_s(self.request_queue.drain_s(now_s)),
            )
        if request.request_id in self.requests:
            raise RequestError(
                f"request_id: {request.request_id} is under way already; give each request its own",
                param="request_id",
            )
        refusal = self.retry_guard.quarantine.refusal(request, now_s)
        if refusal is not None:
            self.metrics.quarantined.inc()
            raise quarantined(*refusal)

    def ended(self, request: Request, journey: Journey, now_s: float, *, is_whole: bool) -> None:
        """Count and keep a request that has ended; `is_whole`: with the end of its answer."""
        pool = self.fleet.pools.get(request.model)
        if pool is not None and is_whole:
            pool.traffic.ended(journey.output_tokens - request.num_emitted, now_s)
        assert journey.outcome is not None, "it has ended"
        metrics = self.metrics
        metrics.cached_tokens.inc(journey.cached_tokens or 0)
        metrics.ended(journey.outcome).inc()
        metrics.request_s.observe(journey.seconds)
        metrics.open_requests.set(len(self.requests))
        self.journeys.end(journey, now_s)

    def no_worker(self, request: Request, problem: PenstockError | None) -> Unavailable:
        """Make the error for a model without a ready worker; `problem` is what the last one said that could not serve the request."""
        models = ", ".join(sorted(self.fleet.models())) or "none"
        prefill = [
            view.name
            for view in self.fleet.workers()
            if view.condition is Condition.PREFILL_ONLY and view.model == request.model
        ]
        advice = "start a worker"
        if prefill:
            advice += f", make one of the {len(prefill)} that only compute prompts answer (penstock role {prefill[0]} decode)"
        return Unavailable(
            f"model {request.adapter or request.model}: no worker was ready within {self.config.no_worker_wait_s:g} s; models"
            f" with ready workers: {models}; {advice}, or try again later"
            + ("" if problem is None else f"; the last worker of this request said: {problem.message}"),
            retry_after_s=1.0,
        )

    def check_refusals(self, request: Request, last: Overloaded | None) -> None:
        """Raise Overloaded where every ready worker has refused a request; `last` is the last refusal."""
        pool = self.fleet.pools.get(request.model)
        if last is not None and pool is not None and pool.has_ready:
            raise Overloaded(
                f"model {request.model}: every worker that is ready has refused this request; the last one: {last.message}",
                retry_after_s=last.retry_after_s or 1.0,
            )

    @staticmethod
    def late(request: Request, output_tokens: int) -> DeadlineExceeded:
        """Make the error for a request past its deadline."""
        return DeadlineExceeded(
            f"request {request.request_id}: {request.deadline_s:g} s have passed and {output_tokens} of at most"
            f" {request.sampling.max_tokens} tokens are there; allow more time or ask for fewer tokens"
        )
