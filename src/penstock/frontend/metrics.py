"""Prometheus metrics of a frontend.

Several frontend processes on one port need PROMETHEUS_MULTIPROC_DIR, set to an empty directory for all of them
before they start: then each of them reports the sums of all.
"""

import asyncio
import copy
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.core.log import get_logger
from penstock.frontend.apis.dialect import Usage
from penstock.frontend.limits.admission import ReceiveMetrics
from penstock.runtime.observations import RequestRecorder
from penstock.seams import RequestStream

_FLUSH_S = 1.0
"""How long a value waits at most, for other processes that read this one's metrics."""
_VALUES_MAX = 4096


class GatheredHistogram(Histogram):
    """Counts values of `gather` whenever it is read, and every second. One event loop owns it."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._gathered = array("d")

    def gather(self, value: float) -> None:
        """Note a value; the labels are set."""
        gathered = self._gathered
        if not gathered:
            asyncio.get_running_loop().call_later(_FLUSH_S, self._count)
        gathered.append(value)
        if len(gathered) >= _VALUES_MAX:
            self._count()

    def flush(self) -> None:
        """Count what was gathered for all labels."""
        for child in self._metrics.values():
            assert isinstance(child, GatheredHistogram), "of the same class"
            child._count()

    def collect(self) -> Iterable[Metric]:
        self.flush()
        return super().collect()

    def _count(self) -> None:
        gathered, self._gathered = self._gathered, array("d")
        if not gathered:
            return
        counts = [0] * len(self._upper_bounds)
        for value in gathered:
            counts[bisect_left(self._upper_bounds, value)] += 1
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(sum(gathered))


_LOG_EVERY_S = 10.0
_log = get_logger()
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class FrontendMetrics(ReceiveMetrics):
    """Metrics of one frontend process. A registry can hold one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "penstock_frontend")
        self._registry = registry
        self.recorder: RequestRecorder | None = None
        """Counts requests into windows for planners; None without a planner's listener."""
        self._requests = Counter(
            "penstock_frontend_requests", "Answers by route and HTTP status.", ["route", "code"], registry=registry
        )  # fmt: skip
        self._inflight = Gauge(
            "penstock_frontend_inflight_requests",
            "Requests in flight.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._media = Gauge(
            "penstock_frontend_media_bytes",
            "Bytes of images, audio and video of requests in flight (media.bytes_max).",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._ttft = Histogram(
            "penstock_frontend_ttft_seconds",
            "From a request's arrival to its first token.",
            ["model"],
            registry=registry,
            buckets=_TTFT_S,
        )
        self._itl = GatheredHistogram(
            "penstock_frontend_itl_seconds",
            "Between tokens of one choice; where several came at once, the mean of their gaps, once.",
            ["model"],
            registry=registry,
            buckets=_ITL_S,
        )
        self._e2e = Histogram(
            "penstock_frontend_e2e_seconds",
            "From a request's arrival to the end of its answer, also of one cut short.",
            ["model"],
            registry=registry,
            buckets=_E2E_S,
        )
        self._tenant_inflight = Gauge(
            "penstock_frontend_tenant_inflight_requests",
            "Requests in flight of a tenant of the key file.",
            ["tenant"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._tenant_refusals = Counter(
            "penstock_frontend_tenant_refusals",
            "Requests refused with 429 at a limit of their tenant.",
            ["tenant", "limit"],
            registry=registry,
        )
        self._tenant_tokens = Counter(
            "penstock_frontend_tenant_tokens",
            "Tokens of a tenant's requests that have ended.",
            ["tenant", "kind"],
            registry=registry,
        )
        self._batch_requests = Counter(
            "penstock_frontend_batch_requests",
            "Requests of batches (`/v1/batches`) that were answered, or failed.",
            ["outcome"],
            registry=registry,
        )
        self._repairs = Counter(
            "penstock_frontend_tool_call_repairs",
            "Tool calls that a model wrote out of its grammar, by what was mended.",
            ["model", "repair"],
            registry=registry,
        )
        self._changing_heads = Counter(
            "penstock_frontend_changing_prompt_heads",
            "Chats whose system message ends as that of earlier ones and begins otherwise, so that no KV is reused, from the third beginning on.",
            ["model"],
            registry=registry,
        )
        self._tokens = {
            kind: Counter(f"penstock_frontend_{kind}_tokens", text, ["model"], registry=registry)
            for kind, text in (
                ("prompt", "Prompt tokens of requests that were sent to a worker."),
                ("cached", "Prompt tokens that a worker's prefix cache gave."),
                ("output", "Tokens generated."),
            )
        }

        # Finding a label's child takes four times as long as counting.
        self._answered: Callable[[str, str], Counter] = cache(self._requests.labels)
        self.of_model: Callable[[str], ModelMetrics] = cache(lambda model: ModelMetrics(self, model))
        """Metrics of a model, which workers serve or served."""

    def inflight(self, change: int) -> None:
        self._inflight.inc(change)

    def media(self, change_bytes: int) -> None:
        self._media.inc(change_bytes)

    def prompt_head_changed(self, model: str) -> None:
        self._changing_heads.labels(model).inc()

    def answered(self, route: str, code: int) -> None:
        self._answered(route, str(code)).inc()

    def tenant_began(self, tenant: str) -> None:
        self._tenant_inflight.labels(tenant).inc()

    def tenant_refused(self, tenant: str, limit: str) -> None:
        self._tenant_refusals.labels(tenant, limit).inc()

    def tenant_ended(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        self._tenant_inflight.labels(tenant).dec()
        self._tenant_tokens.labels(tenant, "prompt").inc(prompt_tokens)
        self._tenant_tokens.labels(tenant, "output").inc(output_tokens)

    def batch_request(self, *, is_answered: bool) -> None:
        self._batch_requests.labels("answered" if is_answered else "failed").inc()

    def timer(self, model: str, arrived: float, prompt_tokens: int) -> "RequestTimer":
        """Start timing a request of `prompt_tokens` that arrived at `arrived` (event loop time)."""
        if self.recorder is not None:
            self.recorder.arrived(prompt_tokens)
        return RequestTimer(self.of_model(model), self.recorder, arrived)

    def expose(self, tenant: Callable[[str], str] = str) -> bytes:
        """Encode all metrics, of all processes where there are several, in Prometheus' text format; `tenant` gives the labels of tenants."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self._itl.flush()
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(_OtherTenants(registry, tenant))


class _OtherTenants(CollectorRegistry):
    """The metrics of a registry, with other labels of tenants."""

    def __init__(self, registry: CollectorRegistry, label: Callable[[str], str]) -> None:
        super().__init__()
        self._registry = registry
        self._label = label

    def collect(self) -> Iterator[Metric]:
        for each in self._registry.collect():
            metric = copy.copy(each)
            metric.samples = [
                sample._replace(labels=sample.labels | {"tenant": self._label(sample.labels["tenant"])})
                if "tenant" in sample.labels
                else sample
                for sample in each.samples
            ]
            yield metric


class ModelMetrics:
    """Metrics with the label of one model."""

    __slots__ = ("cached_tokens", "e2e", "itl", "output_tokens", "prompt_tokens", "repaired", "ttft")

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        self.ttft = metrics._ttft.labels(model)
        self.itl = metrics._itl.labels(model)
        self.e2e = metrics._e2e.labels(model)
        self.repaired: Callable[[str], None] = lambda repair: metrics._repairs.labels(model, repair).inc()
        """Counts a tool call that was mended."""
        tokens = metrics._tokens
        self.prompt_tokens = tokens["prompt"].labels(model)
        self.cached_tokens = tokens["cached"].labels(model)
        self.output_tokens = tokens["output"].labels(model)


class RequestTimer:
    """Observes TTFT, ITL and end-to-end time of one request."""

    __slots__ = (
        "_arrived",
        "_gap_tokens",
        "_gaps_s",
        "_metrics",
        "_recorder",
        "gather",
        "repaired",
        "ttft_s",
    )

    def __init__(self, metrics: ModelMetrics, recorder: RequestRecorder | None, arrived: float) -> None:
        self._metrics = metrics
        self.gather: Callable[[float], None] = metrics.itl.gather
        """Observes one gap between tokens."""
        self.repaired: Callable[[str], None] = metrics.repaired
        self._recorder = recorder
        self._arrived = arrived
        self.ttft_s: float | None = None
        """Seconds to the first token; None before it."""
        self._gaps_s = 0.0
        self._gap_tokens = 0

    def tokens(self, count: int, now: float, last: float | None, stream: RequestStream) -> None:
        """Observe `count` new tokens of a choice's stream at `now`; its previous ones came at `last`, None before the first."""
        if last is not None:
            self._metrics.itl.gather((now - last) / count)
            self._gaps_s += now - last
            self._gap_tokens += count
        elif self.ttft_s is None:
            self.ttft_s = now - self._arrived
            self._metrics.ttft.observe(self.ttft_s)
            if self._recorder is not None:
                self._recorder.first_token(self.ttft_s, waited_for_decode=stream.waited_for_decode)

    def add_gaps(self, seconds: float, tokens: int) -> None:
        """Count gaps for its mean that were gathered one by one."""
        self._gaps_s += seconds
        self._gap_tokens += tokens

    def finish(self, usage: Usage, now: float, *, failed: bool) -> None:
        """Observe its end at `now`; `failed`: with an error of its own, not as its client left."""
        if self._recorder is not None:
            self._recorder.ended(
                output_tokens=usage.completion_tokens,
                cached_tokens=usage.prompt_tokens_details.cached_tokens,
                itl_s=self._gaps_s / self._gap_tokens if self._gap_tokens else None,
                failed=failed,
            )
        metrics = self._metrics
        metrics.e2e.observe(now - self._arrived)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.prompt_tokens_details.cached_tokens)
        metrics.output_tokens.inc(usage.completion_tokens)


class RefusedHandshakes:
    """Counts TLS handshakes that failed, and tells of clients that do not trust the certificate. One event loop owns it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the counter."""
        self._counter = Counter(
            "penstock_frontend_tls_refused",
            "TLS handshakes that failed: the client, such as another region's link, does not trust this port's certificate"
            " (certificate), or spoke no TLS, or left (other).",
            ["reason"],
            registry=registry,
        )
        self._logged_s = -math.inf

    def note(self, peer: str, error: OSError) -> None:
        """Count a handshake; at most one certificate in 10 s is logged.

        Args:
            peer: the client's address.
            error: why it failed.
        """
        reason = getattr(error, "reason", None) or ""
        is_certificate = "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason)
        self._counter.labels("certificate" if is_certificate else "other").inc()
        now_s = asyncio.get_running_loop().time()
        if is_certificate and now_s >= self._logged_s + _LOG_EVERY_S:
            self._logged_s = now_s
            _log.warning(
                "certificate_refused",
                peer=peer,
                reason=reason.lower().replace("_", " "),
                fix="the client does not trust frontend.tls.certificate: give it the authority that signed it (a region's link:"
                " regions.N.tls.authority there), or a certificate of the name that it asks for",
            )
