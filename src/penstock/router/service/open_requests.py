"""Requests that the router alone has named servers for: each counts there until its feedback, or until it was silent for long."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.core.errors import RequestError, WorkerLost
from penstock.core.ids import RequestId
from penstock.core.types.requests import Delta, Request
from penstock.router.candidates import RoutePlan, WorkerRoute
from penstock.router.dispatch.attempt import RoutedRequest
from penstock.router.fleet.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.router.service.gateway import COUNT_MAX, RequestStage


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
