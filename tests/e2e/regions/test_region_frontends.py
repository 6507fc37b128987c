"""A region of two hosts with a frontend each, 80 ms away: one frontend is killed, then the whole region stops, under streams."""

import json
import os
import signal
import subprocess
from contextlib import ExitStack

import pytest

from tests.support.host import TOKENS, Host, text_of, until
from tests.support.triangle import triangle

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.needs("ip", "curl", "namespaces")]
URL = "http://127.0.0.1:8000"
STREAMS, DELAY_S = 4, 0.04
BASE = (
    "frontend.host=0.0.0.0", "roles.aggregated.engine=mock", "roles.aggregated.mock.speedup=0.5",
    f"roles.aggregated.max_running_requests={STREAMS}", "supervision.spare_processes=0",
)  # fmt: skip


def up(host: Host, *settings: str, arguments: tuple[str, ...] = ()) -> None:
    words = [word for setting in (*BASE, *settings) for word in ("--set", setting)]
    host.up(str(host.folder.parent / "graph.yaml"), *arguments, *words)


def workers(host: Host) -> dict:
    return {each["name"]: each for each in host.get(f"{URL}/admin/workers")["workers"]}


def running(host: Host) -> list[int]:
    """Give the running requests of each worker of a region's own."""
    own = [each for name, each in workers(host).items() if not name.startswith("link-")]
    return [(each["load"] or {}).get("running_requests", 0) for each in own]


def gauge(host: Host, noun: str) -> float:
    start = f"penstock_router_link_{noun}{{"
    lines = host.text(f"{URL}/metrics").splitlines()
    return max((float(line.split()[-1]) for line in lines if line.startswith(start)), default=-1.0)


def pids(host: Host) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", host.name], check=True, capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def send(host: Host, number: signal.Signals) -> None:
    """Send a signal to every process of a host."""
    for pid in pids(host):
        os.kill(pid, number)


def frontends(host: Host) -> set[int]:
    listed = json.loads(host.penstock("ps", "--json"))
    found = {
        each["pid"]
        for deployment in listed
        for each in deployment["processes"]
        if each["name"].startswith("frontend")
    }
    return found & set(pids(host))


def streams(host: Host, count: int) -> list:
    return [host.stream(URL, content=f"Tell me {index}") for index in range(count)]


def test_a_killed_frontend_and_a_region_that_falls_silent_lose_no_request(tmp_path):
    (tmp_path / "graph.yaml").write_text("model: demo\n")
    with triangle() as laid, ExitStack() as stack:
        us, one, other = (
            Host(name, tmp_path / f"host-{letter}", stack)
            for name, letter in zip(laid.names, "abc", strict=True)
        )
        laid.carry(0, 1, delay_s=DELAY_S)
        laid.carry(0, 2, delay_s=DELAY_S)
        hub = f"tcp://{laid.address(2, 1)}:7400"
        up(one, "router.location.region=eu", f"runtime.hub={hub}")
        one.wait(r"^penstock +ready")
        up(other, "router.location.region=eu", arguments=("--join", hub))
        other.wait(r"^penstock +ready")
        urls = ", ".join(f"'http://{laid.address(0, number)}:8000'" for number in (1, 2))
        up(us, "router.location.region=us", f"regions=[{{name: eu, urls: [{urls}]}}]")
        us.wait(r"^penstock +ready")
        until(lambda: (gauge(us, "frontends"), gauge(us, "healthy_frontends")) == (2, 2))
        assert gauge(us, "moved_requests") == gauge(us, "refused_requests") == 0
        assert gauge(us, "problem") < 1
        until(lambda: gauge(us, "round_trip_seconds") >= 2 * DELAY_S)

        sent = streams(us, 3 * STREAMS)
        until(lambda: sum(running(us)) and len(running(one)) == 2 and min(running(one)) > 0)
        for pid in frontends(other):
            os.kill(pid, signal.SIGKILL)
        texts = [text_of(stream) for stream in sent]
        assert [tokens for _, tokens in texts] == [TOKENS] * len(texts)
        assert gauge(us, "moved_requests") >= 1, "what the killed frontend streamed went on at the other one"
        until(lambda: gauge(us, "healthy_frontends") == 2)

        sent = streams(us, 3 * STREAMS)
        until(lambda: sum(running(us)) and min(running(one)) > 0)
        for host in (one, other):
            send(host, signal.SIGSTOP)
        try:
            until(lambda: workers(us)["link-eu"]["condition"] == "unhealthy")
            assert gauge(us, "healthy_frontends") == 0
            assert gauge(us, "problem") == 1
            assert [text_of(stream) for stream in sent] == texts, "the same tokens as undisturbed"
        finally:
            for host in (one, other):
                send(host, signal.SIGCONT)
        until(lambda: gauge(us, "healthy_frontends") == 2)
        until(lambda: gauge(us, "problem") == 0)
