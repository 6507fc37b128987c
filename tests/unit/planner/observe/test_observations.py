"""Windows and a Prometheus server add up to what a planner sees."""

import asyncio
import json
import re
from dataclasses import asdict
from urllib.parse import parse_qs, urlsplit

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import ConfigError, ProtocolError, Unavailable
from penstock.core.types.instances import Role
from penstock.frontend.metrics import FrontendMetrics
from penstock.planner.observe.prometheus import PENSTOCK, VLLM, PrometheusSource
from penstock.planner.observe.prometheus_observer import SOURCE, PrometheusObserver
from penstock.planner.observe.stream import ObservationStream
from penstock.router.metrics import RouterMetrics
from penstock.runtime.observations.windows import Digest, RequestWindow, WorkerWindow, bucket_of
from penstock.testing.loop import run_async


def tokens(count, each):
    return Digest(count=count, total=count * each, buckets={bucket_of(each): count})


def requests(arrivals, **fields):
    return RequestWindow(seconds=1.0, arrivals=arrivals, input_tokens=tokens(arrivals, 100), **fields)


def worker(role=Role.DECODE, **fields):
    return WorkerWindow(seconds=1.0, role=role, total_blocks=10, **fields)


@pytest.mark.virtual
async def test_frontends_add_up():
    stream = ObservationStream()
    for _ in range(4):
        await asyncio.sleep(1)
        stream.put("frontend-1", requests(3, finished=2, cached_tokens=120, queued=1, oldest_queued_s=2.0))
        stream.put("frontend-2", requests(1, failed=1, queued=4, oldest_queued_s=0.5))
    seen = stream.observe(10.0)
    demand = seen.demand
    assert (demand.arrivals_per_s, demand.finished_per_s, demand.failed_per_s) == (4.0, 2.0, 1.0)
    assert (demand.input_tokens.count, demand.input_tokens.mean) == (16, 100.0)
    assert demand.cached_share == pytest.approx(0.3)
    assert (demand.queued, demand.oldest_queued_s) == (5, 2.0)
    assert seen.frontends == ("frontend-1", "frontend-2")
    assert stream.observe(1.5).demand.input_tokens.count == 8


@pytest.mark.virtual
async def test_workers_are_seen_in_their_present_role():
    stream = ObservationStream()
    stream.put("decode-1", worker(Role.PREFILL, prefilled_tokens=500))
    stream.put("decode-1", worker(generated_tokens=10, active_blocks=4, running_requests=2))
    stream.put("decode-1", worker(generated_tokens=30, active_blocks=5, running_requests=3))
    seen = stream.observe(10.0)
    (view,) = seen.of(Role.DECODE)
    assert (view.generated_tokens_per_s, view.prefilled_tokens_per_s) == (20.0, 0.0)
    assert (view.kv_usage, view.running_requests) == (0.5, 3)
    assert seen.of(Role.PREFILL) == ()


@pytest.mark.virtual
async def test_silent_sources_leave_the_observation():
    stream = ObservationStream(kept_s=60, silent_after_s=5)
    stream.put("decode-1", worker())
    stream.put("frontend-1", requests(8, queued=7))
    for _ in range(6):
        await asyncio.sleep(1)
        stream.put("decode-2", worker())
        stream.put("frontend-2", requests(1))
    seen = stream.observe(10.0)
    assert [view.name for view in seen.workers] == ["decode-2"]
    assert (seen.frontends, seen.silent) == (("frontend-2",), ("decode-1", "frontend-1"))
    assert seen.demand.queued == 0, "what waits there is not known any more"
    assert seen.demand.input_tokens.count == 14, "what arrived there did arrive"
    await asyncio.sleep(61)
    stream.put("decode-2", worker())
    assert stream.observe(10.0).silent == ("decode-1", "frontend-1", "frontend-2"), "they have not ended"
    for name in ("decode-1", "frontend-1", "frontend-2"):
        stream.forget(name)
    assert stream.observe(10.0).silent == ()
    stream.forget("decode-2")
    assert stream.observe(10.0).workers == ()


@pytest.mark.virtual
async def test_a_process_that_is_ready_and_never_heard_is_silent():
    stream = ObservationStream(silent_after_s=5)
    stream.put("decode-1", worker())
    for name in ("decode-1", "decode-2", "decode-3"):
        stream.expect(name)
    await asyncio.sleep(4)
    stream.put("decode-1", worker())
    stream.put("decode-2", worker())
    assert stream.observe(10.0).silent == ()
    await asyncio.sleep(2)
    assert stream.observe(10.0).silent == ("decode-3",)
    stream.put("decode-3", worker())
    assert stream.observe(10.0).silent == ()
    stream.expect("decode-4")
    stream.forget("decode-4")
    await asyncio.sleep(6)
    assert stream.observe(10.0).silent == ("decode-1", "decode-2", "decode-3")


class Server:
    """Answers by the metric in a query: a number, or (le, number) of each bucket."""

    def __init__(self, values):
        self.values = values
        self.asked = []

    def fetch(self, address):
        (query,) = parse_qs(urlsplit(address).query)["query"]
        self.asked.append(query)
        name = re.search(r"\(([a-z_:0-9]{9,})[\[{)]", query)[1]
        value = self.values.get(name, [])
        series = [({"le": le}, number) for le, number in value] if isinstance(value, list) else [({}, value)]
        result = [{"metric": labels, "value": [0.0, str(number)]} for labels, number in series]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


VALUES = {
    "vllm:request_success_total": 40.4,
    "vllm:prompt_tokens_total": 4000,
    "vllm:generation_tokens_total": 800,
    "vllm:time_to_first_token_seconds_bucket": [("0.1", 10), ("+Inf", 41), ("0.5", 40), ("1.0", 40)],
    "vllm:num_requests_waiting": 7,
}


def test_a_window_is_read():
    server = Server(VALUES)
    source = PrometheusSource("http://p:9090/", VLLM, selector='namespace="chat"', fetch=server.fetch)
    window = run_async(source.read(30.0))
    assert (window.arrivals, window.queued, window.seconds) == (40, 7, 30.0)
    assert (window.input_tokens.mean, window.output_tokens.mean) == (100.0, 20.0)
    assert window.ttft_s.count == 41
    assert window.ttft_s.quantile(0.1) == pytest.approx(0.05, rel=0.06)
    assert window.ttft_s.quantile(0.5) == pytest.approx(0.3, rel=0.06)
    assert window.ttft_s.quantile(1.0) == pytest.approx(1.0, rel=0.06)
    assert window.itl_s.count == 0, "a series that is missing"
    assert all('{namespace="chat"}' in query for query in server.asked)
    assert 'sum(increase(vllm:prompt_tokens_total{namespace="chat"}[30s]))' in server.asked


def test_values_that_are_no_numbers_are_none():
    server = Server({"vllm:request_success_total": "NaN", "vllm:num_requests_waiting": -1})
    window = run_async(PrometheusSource("http://p:9090", VLLM, fetch=server.fetch).read(30.0))
    assert (window.arrivals, window.queued, window.input_tokens.count) == (0, 0, 0)


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (b"<html>", ProtocolError, "none of Prometheus' HTTP API"),
        (b'{"status": "success", "data": {"result": [1]}}', ProtocolError, "none of Prometheus' HTTP API"),
        (b'{"status": "error", "error": "parse error"}', Unavailable, "refuses .*: parse error"),
    ],
)
def test_other_answers_are_refused(answer, error, why):
    with pytest.raises(error, match=why):
        run_async(PrometheusSource("http://p:9090", fetch=lambda _: answer).read(30.0))


@pytest.mark.parametrize("url", ["p:9090", "ftp://p", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="expected a URL such as"):
        PrometheusSource(url)


def test_our_own_metrics_have_these_names():
    registry = CollectorRegistry()
    FrontendMetrics(registry)
    RouterMetrics(registry)
    known = {
        f"{metric.name}{suffix}"
        for metric in registry.collect()
        for suffix in {"counter": ["_total"], "histogram": ["_bucket", "_count"]}.get(metric.type, [""])
    }
    assert set(filter(None, asdict(PENSTOCK).values())) <= known


def test_instances_are_workers_and_a_server_without_series_is_no_frontend():
    def fetch(address):
        (query,) = parse_qs(urlsplit(address).query)["query"]
        asked.append(query)
        series = []
        if "by (instance)" in query:
            value = next(
                number
                for name, number in (("process_start", 40.0), ("running", 2), ("usage", 0.5), ("waiting", 4))
                if name in query
            )
            series = [{"metric": {"instance": "a:1"}, "value": [0, str(value)]}]
        return json.dumps({"status": "success", "data": {"result": series}}).encode()

    asked = []
    source = PrometheusSource("http://p:9090", VLLM, fetch=fetch)
    seen = run_async(PrometheusObserver(source, scrape_s=30.0).observe(10.0))
    (worker,) = seen.workers
    assert (worker.name, worker.role, worker.running_requests) == ("a:1", Role.AGGREGATED, 2)
    assert (worker.waiting_requests, worker.kv_usage, worker.ready_s) == (4, 0.5, 40.0)
    assert seen.frontends == ()
    assert seen.seconds == 75.0, "two scrapes and a half at least"
    assert not any("increase" in query for query in asked)


def test_workers_of_windows_count_beside_the_demand_of_prometheus():
    async def main():
        stream = ObservationStream()
        stream.put("worker-1", WorkerWindow(seconds=1.0, role=Role.DECODE, running_requests=5))
        stream.put("frontend-1", RequestWindow(seconds=1.0, arrivals=1000))
        server = Server(VALUES)

        def fetch(address):
            if "sum" in address:
                return server.fetch(address)
            return b'{"status": "success", "data": {"result": [{"metric": {}, "value": [0, "7"]}]}}'

        source = PrometheusSource("http://p:9090", VLLM, fetch=fetch)
        observer = PrometheusObserver(source, scrape_s=1.0, workers=stream.observe)
        return await observer.observe(10.0)

    seen = run_async(main())
    assert [(each.name, each.role, each.running_requests) for each in seen.workers] == [
        ("worker-1", Role.DECODE, 5)
    ]
    assert seen.demand.arrivals_per_s == 4.0
    assert seen.frontends == (SOURCE,)


@pytest.mark.virtual
async def test_a_source_keeps_a_bounded_number_of_windows():
    stream = ObservationStream(windows_max=3)
    for _ in range(10):
        stream.put("frontend-1", requests(1))
    assert stream.observe(100.0).demand.input_tokens.count == 3
