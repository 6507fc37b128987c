"""The spans of one request in a frontend: the request itself, the router's decision, and each worker that had it."""

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

import msgspec

from penstock.frontend.frontend import PendingAnswer
from penstock.frontend.limits.headers import RequestOptions
from penstock.router.dispatch.journeys import Journey
from penstock.router.explain.explanation import Explanation
from penstock.runtime import spans
from penstock.seams import RequestDispatcher


@dataclass(slots=True)
class TracedRequest:
    """A request whose trace is sampled; `pending` once it was prepared."""

    span: spans.Span
    dispatcher: RequestDispatcher
    pending: PendingAnswer | None = None

    @classmethod
    def begin(cls, path: str, options: RequestOptions, dispatcher: RequestDispatcher) -> Self | None:
        """Begin its span; None where it is not traced."""
        if not spans.is_recording():
            return None
        parent = None if options.trace is None or not options.trace.traceparent else options.trace
        span = spans.begin(f"POST {path}", parent, asyncio.get_running_loop().time(), is_server=True)
        return None if span is None else cls(span, dispatcher)

    def carried(self, options: RequestOptions) -> RequestOptions:
        """Give the options with the span as what workers work for; the client's `X-Request-Id` goes along."""
        trace, given = self.span.trace, options.trace
        if given is not None:
            trace = type(trace)(
                request_id=given.request_id, traceparent=trace.traceparent, tracestate=given.tracestate
            )
        return msgspec.structs.replace(options, trace=trace)

    def end(self, route: str, status: int) -> None:
        """Record the spans within it, and end it."""
        now_s = asyncio.get_running_loop().time()
        attributes: dict[str, str | int | float | bool] = {
            "http.route": route,
            "http.response.status_code": status,
        }
        if self.pending is not None:
            usage, prepared = self.pending.completion.usage(), self.pending.prepared
            attributes |= {
                "gen_ai.request.model": prepared.model.card.name,
                "gen_ai.response.id": prepared.id,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "penstock.cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "penstock.stream": self.pending.stream,
            }
            if prepared.options.tenant:
                attributes["penstock.tenant"] = prepared.options.tenant
            if (ttft_s := self.pending.completion.ttft_s) is not None:
                attributes["penstock.ttft_s"] = ttft_s
            decisions = {each.request_id: each for each in self._decisions(prepared.id)}
            for journey in self.dispatcher.journeys(prepared.id):
                if isinstance(journey, Journey):
                    self._record(journey, decisions.get(journey.request_id), now_s)
        failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        self.span.end(now_s, attributes, error=HTTPStatus(status).phrase if failed else "")

    def _decisions(self, answer_id: str) -> Iterator[Explanation]:
        return (each for each in self.dispatcher.explain(answer_id) if isinstance(each, Explanation))

    def _record(self, journey: Journey, decision: Explanation | None, now_s: float) -> None:
        """Record the router's part of a choice, and each worker's."""
        opened_s, trace = now_s - journey.age_s, self.span.trace
        routed: dict[str, str | int | float | bool] = {"penstock.request_id": journey.request_id}
        if decision is not None:
            chosen = decision.chosen
            routed |= {
                "penstock.policy": decision.policy,
                "penstock.reason": decision.reason.value,
                "penstock.worker": decision.worker,
                "penstock.candidates": decision.num_candidates,
                "penstock.overlap_blocks": chosen.overlap_blocks,
                **{f"penstock.cost.{name}": value for name, value in chosen.terms.items()},
            }
            if decision.prefill is not None and decision.prefill.worker is not None:
                routed["penstock.prefill_worker"] = decision.prefill.worker
        spans.record("router", trace, opened_s, opened_s + journey.queued_s, routed)
        for leg in journey.legs:
            ended_s = journey.seconds if leg.ended_s is None else leg.ended_s
            spans.record(
                f"send to {leg.worker}",
                trace,
                opened_s + leg.sent_s,
                opened_s + ended_s,
                {"penstock.worker": leg.worker, "penstock.part": leg.part.value},
            )


traced_request: ContextVar[TracedRequest | None] = ContextVar("traced_request", default=None)
"""Of the request being handled."""
