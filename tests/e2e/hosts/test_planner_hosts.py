"""One planner for two hosts of network namespaces: it adds workers on the other one and takes them away, through faults."""

import re
import signal
import threading

import pytest

from tests.e2e.helpers.planned import FAST
from tests.e2e.hosts.conftest import FIRST
from tests.support.host import text_of, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]
STREAM_TOKENS = 60
AT_ONCE = 8


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


def test_load_starts_workers_on_the_other_host_and_its_end_takes_them_away_also_after_a_kill(pair):
    """At first there is no worker: the planner starts one."""
    settings = FAST | {
        "roles.aggregated.max_running_requests": 2,
        "planner.max_workers": 4,
        "planner.address": f"tcp://{pair.laid.addresses[0]}:7410",
        "slo.ttft_s": 0.2,
        "slo.itl_s": 0.1,
        "request_plane.heartbeat_interval_s": 0.5,
        "request_plane.heartbeat_timeout_s": 2,
        "worker.drain_timeout_s": 10,
    }
    room = {"roles.aggregated.replicas_max": 3}
    pair.start_first(
        settings | {"roles.aggregated.replicas_max": 1}, "--run", "frontend,planner,aggregated=0", ready="^planner +starting"
    )  # fmt: skip
    pair.first.wait(r"^penstock +ready")
    there = pair.start_second(settings | room, "aggregated=0")
    pair.until_ready(FIRST)
    on_b = {f"worker-{number}@host-b" for number in (1, 2, 3)}
    with Streams(pair.first, pair.url) as load:
        pair.until_ready(FIRST, *on_b)
        there.send_signal(signal.SIGKILL)
        there.wait(timeout=60)
        pair.until_ready(FIRST)
        load.more(AT_ONCE)
        there = pair.start_second(settings | room, "aggregated=0")
        assert any("3 aggregated: set by planner before the restart" in line for line in pair.second.lines)
        pair.until_ready(FIRST, *on_b)
        load.more(AT_ONCE)
    one = pair.first.stream(pair.url, 600)
    until(lambda: [each["condition"] for each in pair.workers().values()].count("ready") == 1)
    assert text_of(one)[1] == 600
    assert there.poll() is None
    (log,) = pair.first.folder.rglob("planner.jsonl")
    retired = {
        name for found in re.findall(r'"retires":\[(.*?)\]', log.read_text()) for name in found.split('"')
    }
    assert len(retired & on_b) >= 2, "the last three of four; one of host a's may be among them"
    metrics = f"{pair.url}/metrics"
    until(lambda: 'penstock_planner_workers{role="aggregated"} 1.0' in pair.first.text(metrics))
    assert 'penstock_planner_rounds_total{outcome="failed"}' not in pair.first.text(metrics)
