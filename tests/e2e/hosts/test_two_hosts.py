"""One deployment on two hosts of network namespaces: three commands, a cut cable, secrets and addresses that are wrong."""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.deploy.secret import SECRET_VARIABLE
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from tests.support.cable import cable

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.needs("ip", "curl", "namespaces")]
GRAPH = Path(__file__).parents[3] / "examples" / "two_hosts.yaml"
ADMIN_TOKEN = "a" * 40
TIMEOUT_S = 90.0
TOKENS = 600


class Host:
    """One namespace: `penstock up` in it, and curl."""

    def __init__(self, name, folder, stack):
        self.name = name
        self.folder = folder
        self.lines = []
        self._stack = stack
        folder.mkdir()

    def command(self, *words):
        return ["ip", "netns", "exec", self.name, *words]

    def environment(self, secret):
        folders = {"PENSTOCK_STATE_DIR": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder)}
        secrets = {SECRET_VARIABLE: secret, ADMIN_TOKEN_VARIABLE: ADMIN_TOKEN}
        return os.environ | folders | secrets | {"PENSTOCK_HOST": self.folder.name}

    def up(self, *arguments, secret="a secret of both hosts"):
        process = subprocess.Popen(
            self.command(sys.executable, "-m", "penstock", "up", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(secret),
        )
        self._stack.callback(self._end, process)
        lines = queue.Queue()

        def read():
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        self._lines = lines
        return process

    def wait(self, pattern):
        deadline = time.monotonic() + TIMEOUT_S
        while (line := self._lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return line
        raise AssertionError(f"ended without {pattern!r}: {self.lines}")

    def get(self, url):
        header = f"Authorization: Bearer {ADMIN_TOKEN}"
        done = subprocess.run(self.command("curl", "-sS", "-H", header, url), check=True, capture_output=True)
        return json.loads(done.stdout)

    def stream(self, url, max_tokens=TOKENS):
        """Begin a seeded stream."""
        body = {
            "model": "penstock-demo", "messages": [{"role": "user", "content": "Tell me"}], "seed": 7,
            "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        words = ("curl", "-sSN", "-H", "Content-Type: application/json", "-d", json.dumps(body))
        process = subprocess.Popen(
            self.command(*words, f"{url}/v1/chat/completions"), stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(process.kill)
        return process

    @staticmethod
    def _end(process):
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.stdout.close()


def text_of(stream):
    """Wait for a stream's end; return its text and the number of tokens."""
    out, _ = stream.communicate(timeout=TIMEOUT_S)
    events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
    assert all("error" not in event for event in events), out[-500:]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text, events[-1]["usage"]["completion_tokens"]


@pytest.fixture
def hosts(tmp_path):
    with cable() as laid, ExitStack() as stack:
        pair = [
            Host(name, tmp_path / f"host-{letter}", stack)
            for name, letter in zip(laid.names, "ab", strict=True)
        ]
        yield laid, *pair


def until(holds):
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_three_commands_and_a_cable_that_is_cut_under_streams(hosts):
    laid, first, second = hosts
    hub = f"tcp://{laid.addresses[0]}:7400"
    settings = [
        "roles.aggregated.engine=mock", "roles.aggregated.mock.speedup=0.5", "supervision.spare_processes=0",
        "request_plane.heartbeat_interval_s=0.5", "request_plane.heartbeat_timeout_s=2",
    ]  # fmt: skip
    flags = [flag for setting in settings for flag in ("--set", setting)]
    first.up(str(GRAPH), "--set", f"runtime.hub={hub}", *flags)
    first.wait(r"^penstock +ready")
    second.up(str(GRAPH), "--join", hub, "--run", "aggregated", *flags)
    second.wait(r"^penstock +ready +no frontend here")
    url = f"http://{laid.addresses[0]}:8000"

    def workers():
        return {worker["name"]: worker for worker in first.get(f"{url}/admin/workers")["workers"]}

    def ready():
        return {name for name, worker in workers().items() if worker["condition"] == "ready"}

    both = {"worker-1@host-a", "worker-1@host-b"}
    until(lambda: ready() == both)
    assert workers()["worker-1@host-b"]["address"].startswith(f"tcp://{laid.addresses[1]}:")
    undisturbed = text_of(second.stream(url))
    assert undisturbed[1] == TOKENS
    streams = [first.stream(url) for _ in range(4)]

    def all_run():
        running = [(worker["load"] or {}).get("running_requests", 0) for worker in workers().values()]
        return sum(running) == len(streams) and min(running) > 0

    until(all_run)
    laid.pull()
    until(lambda: ready() == {"worker-1@host-a"})
    assert [text_of(stream) for stream in streams] == [undisturbed] * len(streams)
    laid.plug_in()
    until(lambda: ready() == both)
    assert text_of(second.stream(url)) == undisturbed
    assert "failed" not in " ".join(second.lines), "nobody was started again"


def test_a_wrong_secret_and_an_address_without_a_hub_end_in_one_line(hosts):
    laid, first, second = hosts
    hub = f"tcp://{laid.addresses[0]}:7400"
    engine = ("--set", "roles.aggregated.engine=mock", "--set", "supervision.spare_processes=0")
    nobody = second.up(str(GRAPH), "--join", hub, "--run", "aggregated", *engine)
    second.wait(rf"^penstock: hub at {hub}: .*is the supervisor running")
    assert nobody.wait(timeout=TIMEOUT_S) == 1
    first.up(str(GRAPH), "--set", f"runtime.hub={hub}", "--run", "aggregated", *engine)
    first.wait(r"^penstock +ready")
    stranger = second.up(str(GRAPH), "--join", hub, *engine, secret="a guess of a stranger")
    second.wait(r"^penstock: hub at .*deployment secret: the peer's proof does not fit")
    assert stranger.wait(timeout=TIMEOUT_S) == 1
    first.wait("client_refused.*deployment secret")
