"""One planner for two hosts of network namespaces: it adds workers on the other one and takes them away, through faults."""

import re
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.helpers.planned import FAST
from tests.support.cable import cable
from tests.support.host import Host, text_of, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]
GRAPH = Path(__file__).parents[3] / "examples" / "two_hosts.yaml"
STREAM_TOKENS = 60
AT_ONCE = 8


@pytest.fixture
def hosts(tmp_path):
    with cable() as laid, ExitStack() as stack:
        pair = [
            Host(name, tmp_path / f"host-{letter}", stack)
            for name, letter in zip(laid.names, "ab", strict=True)
        ]
        yield laid, *pair


class Streams:
    """Equal streams, several at once, until the context ends; each is whole."""

    def __init__(self, host, url):
        self.texts = set()
        self.count = 0
        self.failures = []
        self._host, self._url = host, url
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(AT_ONCE)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        for thread in self._threads:
            thread.join()
        assert not self.failures, self.failures[:3]
        assert len(self.texts) == 1, "every stream is whole and the same"

    def more(self, count):
        before = self.count
        until(lambda: self.count >= before + count or self.failures)

    def _run(self):
        while not self._ends.is_set():
            try:
                self.texts.add(text_of(self._host.stream(self._url, STREAM_TOKENS)))
            except Exception as error:  # noqa: BLE001 - told at the end
                self.failures.append(repr(error))
            self.count += 1


def test_load_starts_workers_on_the_other_host_and_its_end_takes_them_away_also_after_a_kill(hosts):
    laid, first, second = hosts
    hub = f"tcp://{laid.addresses[0]}:7400"
    settings = FAST | {
        "roles.aggregated.engine": "mock",
        "roles.aggregated.max_running_requests": 2,
        "planner.max_workers": 4,
        "planner.address": f"tcp://{laid.addresses[0]}:7410",
        "slo.ttft_s": 0.2,
        "slo.itl_s": 0.1,
        "request_plane.heartbeat_interval_s": 0.5,
        "request_plane.heartbeat_timeout_s": 2,
        "worker.drain_timeout_s": 10,
    }

    def flags(room):
        given = settings | {"roles.aggregated.replicas_max": room}
        return [flag for name, value in given.items() for flag in ("--set", f"{name}={value}")]

    first.up(
        str(GRAPH), "--set", f"runtime.hub={hub}", *flags(1), "--run", "frontend,planner,aggregated",
    )  # fmt: skip
    first.wait(r"^penstock +ready")

    def start_second():
        process = second.up(str(GRAPH), "--join", hub, "--run", "aggregated=0", *flags(3))
        second.wait(r"^penstock +ready +no frontend here")
        return process

    there = start_second()
    url = f"http://{laid.addresses[0]}:8000"

    def workers():
        found = first.get(f"{url}/admin/workers")["workers"]
        return {each["name"] for each in found if each["condition"] == "ready"}

    until(lambda: workers() == {"worker-1@host-a"})
    on_b = {f"worker-{number}@host-b" for number in (1, 2, 3)}
    with Streams(first, url) as load:
        until(lambda: workers() == {"worker-1@host-a", *on_b})
        there.send_signal(signal.SIGKILL)
        there.wait(timeout=60)
        until(lambda: workers() == {"worker-1@host-a"})
        load.more(AT_ONCE)
        there = start_second()
        assert any("3 aggregated: set by planner before the restart" in line for line in second.lines)
        until(lambda: workers() == {"worker-1@host-a", *on_b})
        load.more(AT_ONCE)
    one = first.stream(url, 600)
    until(lambda: len(workers()) == 1)
    assert text_of(one)[1] == 600
    assert there.poll() is None
    (log,) = first.folder.rglob("planner.jsonl")
    retired = {
        name for found in re.findall(r'"retires":\[(.*?)\]', log.read_text()) for name in found.split('"')
    }
    assert len(retired & on_b) >= 2, "the last three of four; one of host a's may be among them"
    until(lambda: 'penstock_planner_workers{role="aggregated"} 1.0' in first.text(f"{url}/metrics"))
    assert 'penstock_planner_rounds_total{outcome="failed"}' not in first.text(f"{url}/metrics")


def test_a_deployment_without_workers_is_started_by_its_planner(hosts):
    laid, first, second = hosts
    hub = f"tcp://{laid.addresses[0]}:7400"
    settings = FAST | {
        "roles.aggregated.engine": "mock", "planner.min_workers": 2, "planner.max_workers": 4,
        "planner.address": f"tcp://{laid.addresses[0]}:7410", "roles.aggregated.replicas_max": 1,
    }  # fmt: skip
    flags = [flag for name, value in settings.items() for flag in ("--set", f"{name}={value}")]
    first.up(str(GRAPH), "--set", f"runtime.hub={hub}", *flags, "--run", "frontend,planner,aggregated=0")
    first.wait(r"^planner +starting")
    second.up(str(GRAPH), "--join", hub, "--run", "aggregated=0", *flags)
    second.wait(r"^penstock +ready +no frontend here")
    first.wait(r"^penstock +ready")
    url = f"http://{laid.addresses[0]}:8000"

    def workers():
        found = first.get(f"{url}/admin/workers")["workers"]
        return {each["name"] for each in found if each["condition"] == "ready"}

    until(lambda: workers() == {"worker-1@host-a", "worker-1@host-b"})
