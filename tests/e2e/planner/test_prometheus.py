"""A planner that observes by a real Prometheus server, which scrapes metrics of Penstock, vLLM and SGLang."""

import asyncio
import contextlib
import http.server
import socket
import subprocess
import threading
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from penstock.core.errors import Unavailable
from penstock.core.types.instances import Role
from penstock.frontend.metrics import FrontendMetrics
from penstock.frontend.openai.answers import PromptTokensDetails, Usage
from penstock.planner.observe.prometheus import PENSTOCK, QUERIES, PrometheusSource
from penstock.planner.observe.prometheus_observer import SOURCE, PrometheusObserver
from penstock.router.metrics import RouterMetrics

pytestmark = [pytest.mark.slow, pytest.mark.needs("prometheus")]
SCRAPE_S = 0.5


class Penstock:
    """The real metrics of a frontend, of requests that nobody computes."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.frontend, self.router = FrontendMetrics(self.registry), RouterMetrics(self.registry)
        self.router.queued_requests.set(3)

    def serve_one(self):
        timer = self.frontend.timer("m", 0.0, 1000)
        stream = SimpleNamespace(waited_for_decode=False)
        for now, last in ((0.2, None), (0.22, 0.2), (0.24, 0.22)):
            timer.tokens(1, now, last, stream)
        usage = Usage(1000, 50, 1050, PromptTokensDetails(cached_tokens=0))
        timer.finish(usage, 1.2, failed=False)


class Engine:
    """The series of a vLLM or SGLang server, by their names."""

    def __init__(self, queries):
        self.registry = registry = CollectorRegistry()

        def counter(name):
            return Counter(name.removesuffix("_total"), "-", registry=registry)

        def histogram(name, bounds):
            return Histogram(name.removesuffix("_bucket"), "-", buckets=bounds, registry=registry)

        self.requests, self.inputs = counter(queries.requests), counter(queries.input_tokens)
        self.outputs, self.cached = counter(queries.output_tokens), counter(queries.cached_tokens)
        self.ttft = histogram(queries.ttft_s, (0.1, 0.3, 1.0))
        self.itl = histogram(queries.itl_s, (0.01, 0.03, 0.1))
        Gauge(queries.queued, "-", registry=registry).set(3)
        Gauge(queries.running, "-", registry=registry).set(7)
        Gauge(queries.kv_usage, "-", registry=registry).set(0.25)
        began = Gauge("process_start_time_seconds", "-", registry=registry)
        began.set_to_current_time()

    def serve_one(self):
        self.requests.inc()
        self.inputs.inc(1000)
        self.outputs.inc(50)
        self.cached.inc(250)
        self.ttft.observe(0.2)
        for _ in range(49):
            self.itl.observe(0.02)


@contextlib.contextmanager
def exposed(registry):
    """Serve a registry's metrics over HTTP; gives host and port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = generate_latest(registry)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def prometheus(directory, targets):
    """Run Prometheus over these targets, by job; gives its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = "".join(
        f"  - job_name: {job}\n    static_configs: [{{targets: ['{target}']}}]\n"
        for job, target in targets.items()
    )
    config = directory / "prometheus.yml"
    config.write_text(f"global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}\nscrape_configs:\n{jobs}")
    flags = {"config.file": config, "storage.tsdb.path": directory / "data", "log.level": "error"}
    flags |= {"web.listen-address": f"127.0.0.1:{port}"}
    command = ["prometheus", *(f"--{name}={value}" for name, value in flags.items())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            yield url
        finally:
            process.terminate()
            process.wait(20)


async def until_ready(url):
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(urllib.request.urlopen, f"{url}/-/ready", None, 5)
                return
            await asyncio.sleep(0.1)


async def load(servers, seconds, per_s):
    """Let each of the servers have `per_s` requests a second, or as many as the machine makes; returns how many."""
    loop = asyncio.get_running_loop()
    begun_s, count = loop.time(), 0
    while loop.time() < begun_s + seconds:
        for server in servers:
            server.serve_one()
        count += 1
        await asyncio.sleep(1 / per_s)
    return count / (loop.time() - begun_s)


def test_planners_see_what_real_prometheus_scraped(tmp_path):
    servers = {"penstock": Penstock()}
    servers |= {name: Engine(QUERIES[name]) for name in ("vllm", "sglang")}

    async def main(url):
        await until_ready(url)
        observers = {
            name: PrometheusObserver(
                PrometheusSource(url, QUERIES[name], selector=f'job="{name}"'), scrape_s=SCRAPE_S
            )
            for name in servers
        }
        empty = PrometheusObserver(PrometheusSource(url, PENSTOCK, selector='job="none"'), scrape_s=SCRAPE_S)
        assert (await empty.observe(5)).frontends == ()
        served_per_s = await load(servers.values(), 12, 20)
        for name, observer in observers.items():
            seen = await observer.observe(8)
            demand = seen.demand
            assert seen.frontends == (SOURCE,), name
            assert demand.arrivals_per_s == pytest.approx(served_per_s, rel=0.5), name
            assert demand.input_tokens.mean == pytest.approx(1000, rel=0.1), name
            assert demand.output_tokens.mean == pytest.approx(50, rel=0.1), name
            assert demand.cached_share == pytest.approx(0.0 if name == "penstock" else 0.25, abs=0.05), name
            assert 0.1 < demand.ttft_s.quantile(0.9) < 0.3, name
            assert 0.01 < demand.itl_s.quantile(0.9) < 0.03, name
            assert demand.queued == 3, name
            if name == "penstock":
                assert seen.workers == ()
                continue
            (worker,) = seen.of(Role.AGGREGATED)
            assert (worker.running_requests, worker.waiting_requests, worker.kv_usage) == (7, 3, 0.25)
            assert 5 < worker.ready_s < 600

    with contextlib.ExitStack() as stack:
        targets = {name: stack.enter_context(exposed(each.registry)) for name, each in servers.items()}
        url = stack.enter_context(prometheus(tmp_path, targets))
        asyncio.run(main(url))
    with pytest.raises(Unavailable, match="nobody answers"):
        asyncio.run(PrometheusObserver(PrometheusSource(url)).observe(5))
