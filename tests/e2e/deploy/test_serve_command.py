"""`penstock serve` as people run it: what it prints, how it ends, and what it says to wrong input."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from penstock.deploy.state import load_admin_token

pytestmark = pytest.mark.slow

MODEL = "penstock-demo"
TIMEOUT_S = 60.0


class Command:
    """A running `penstock serve`; its lines are kept as they come."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "serve", *arguments, "--set", "supervision.spare_processes=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def wait_line(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches, and give the match."""
        while (line := self._queue.get(timeout=TIMEOUT_S)) is not None:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"ended without {pattern!r}: {self.lines} {self.process.stderr.read()}")

    def wait_ready(self) -> str:
        """Wait until it serves; give its URL."""
        return self.wait_line(r"^penstock +ready +(http://\S+)")[1]

    def end(self) -> tuple[int, str]:
        """Wait for its end; give exit code and what stood on stderr."""
        while (line := self._queue.get(timeout=TIMEOUT_S)) is not None:
            self.lines.append(line)
        return self.process.wait(timeout=TIMEOUT_S), self.process.stderr.read()


@pytest.fixture
def serve(runtime_dir):
    running: list[Command] = []

    def start(*arguments: str) -> Command:
        running.append(Command(*arguments))
        return running[-1]

    yield start
    for command in running:
        if command.process.poll() is None:
            command.process.terminate()
        command.process.wait(timeout=TIMEOUT_S)
        command.process.stdout.close()
        command.process.stderr.close()


def get(url):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {load_admin_token()}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def workers_of(url):
    return json.loads(get(f"{url}/admin/workers"))["workers"]


def chat_stream(url, max_tokens):
    messages = [{"role": "user", "content": "hi"}]
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=30)


def test_the_first_chat_and_every_change_of_state_are_shown(serve):
    command = serve("--engine", "mock", "--workers", "2", "--port", "0", "--first-chat")
    url = command.wait_ready()
    assert command.lines[0].split() == ["penstock", "starting", "model", MODEL]
    names = [line.split()[0] for line in command.lines[1:-1]]
    assert sorted(names) == ["frontend-1", "worker-1", "worker-2"]
    assert any(
        re.match(r"worker-1 +ready +mock  penstock-demo  \d+ blocks  \d+\.\d s$", line)
        for line in command.lines
    )
    command.wait_line(r"^you> What is Penstock\?")
    assert command.wait_line(rf"^{MODEL}> (.+)")[1].strip()
    command.wait_line(f"curl {url}/v1/chat/completions")
    command.wait_line(f"curl {url}/metrics")
    assert "penstock_frontend" in get(f"{url}/metrics")
    assert {worker["name"] for worker in workers_of(url)} == {
        "worker-1",
        "worker-2",
    }
    command.process.send_signal(signal.SIGINT)
    code, error = command.end()
    assert (code, error) == (0, "")
    assert command.lines[-1].split() == ["penstock", "stopped"]


def test_sigterm_finishes_streams_and_leaves_nothing(serve, runtime_dir):
    command = serve("--engine", "mock", "--workers", "2", "--port", "0")
    url = command.wait_ready()
    children = psutil.Process(command.process.pid).children(recursive=True)
    assert len(children) == 4, "two workers, a frontend and the guard of their process groups"
    with chat_stream(url, max_tokens=100) as response:
        first = response.readline()
        command.process.send_signal(signal.SIGTERM)
        command.wait_line(r"^penstock +stopping")
        deadline = time.monotonic() + 5
        while True:  # a new connection is refused while the old stream goes on
            try:
                get(f"{url}/live")
            except (urllib.error.URLError, ConnectionError):
                break
            assert time.monotonic() < deadline
        rest = response.read()
    events = [json.loads(line[6:]) for line in (first + rest).splitlines() if line.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert rest.rstrip().endswith(b"data: [DONE]")
    code, error = command.end()
    assert (code, error) == (0, "")
    assert not any(child.is_running() for child in children)
    assert list(runtime_dir.iterdir()) == []


def test_a_second_signal_does_not_wait(serve):
    command = serve("--engine", "mock", "--port", "0")
    with chat_stream(command.wait_ready(), max_tokens=4000) as response:
        response.readline()
        command.process.send_signal(signal.SIGINT)
        command.wait_line(r"^penstock +stopping")
        told = time.monotonic()
        command.process.send_signal(signal.SIGINT)
        assert b"the server is shutting down" in response.read()
        code, _ = command.end()
    assert code == 0
    assert time.monotonic() - told < 5


def test_a_signal_while_it_starts_ends_it(serve, runtime_dir):
    command = serve("--engine", "mock", "--workers", "2", "--port", "0")
    deadline = time.monotonic() + TIMEOUT_S
    while not psutil.Process(command.process.pid).children():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    command.process.send_signal(signal.SIGTERM)
    code, error = command.end()
    assert (code, error) == (0, "")
    assert list(runtime_dir.iterdir()) == []


def test_a_killed_worker_is_started_again(serve):
    command = serve("--engine", "mock", "--port", "0")
    url = command.wait_ready()
    (worker,) = workers_of(url)
    os.kill(worker["pid"], signal.SIGKILL)
    command.wait_line(r"^worker-1 +failed +killed by SIGKILL; starts again in 0\.2 s")
    command.wait_line(r"^worker-1 +ready")
    deadline = time.monotonic() + 5
    while not (ready := [w for w in workers_of(url) if w["condition"] == "ready"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ready[0]["worker_id"] != worker["worker_id"]
    with chat_stream(url, max_tokens=3) as response:
        assert b"[DONE]" in response.read()


def test_it_serves_on_when_nobody_reads_its_lines(serve):
    command = serve("--engine", "mock", "--port", "0")
    url = command.wait_ready()
    pipe = command.process.stdout.fileno()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, pipe)  # the pipe has no reader any more
    os.close(null)
    (first,) = workers_of(url)
    os.kill(first["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not any(
        w["condition"] == "ready" and w["worker_id"] != first["worker_id"] for w in workers_of(url)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.process.send_signal(signal.SIGHUP)
    assert command.process.wait(timeout=20) == 0


def complaint(*arguments: str) -> str:
    """Run a command that must fail: exit code 2, one line, no traceback, and no word of success."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2, done
    assert re.fullmatch(r"(penstock +starting +model \S+\n)?", done.stdout)
    assert not (done.stdout and "no such directory" in done.stderr), "nothing starts then"
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("penstock: ").rstrip()


def test_a_port_in_use_is_one_line(runtime_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert complaint("serve", "--engine", "mock", "--port", str(port)) == (
            f"frontend.port: {port} on 127.0.0.1 is in use; stop what listens there, or choose another with --port"
        )


def test_a_bad_model_directory_is_one_line(runtime_dir, tmp_path: Path):
    assert "no such directory: ./absent" in complaint("serve", "./absent", "--port", "0")
    assert "no config.json" in complaint("serve", str(tmp_path), "--port", "0")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    assert "no tokenizer.json" in complaint("serve", str(tmp_path), "--port", "0")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "no weights" in complaint("serve", str(tmp_path), "--port", "0")


def test_what_only_the_engine_can_tell_is_one_line(runtime_dir):
    flags = ("--engine", "mock", "--workers", "2", "--port", "0")
    wrong = ("--set", "roles.aggregated.mock.kv_bytes_per_block=5")
    assert "kv_bytes_per_block" in complaint("serve", *flags, *wrong)


def test_bad_flags_and_graphs_are_one_line(runtime_dir, tmp_path: Path):
    assert complaint("serve", "--wrokers", "2") == (
        "penstock serve: unknown flag --wrokers; did you mean '--workers'?"
    )
    path = tmp_path / "graph.yaml"
    path.write_text("model: demo\nroles: {aggregated: {replicas: -1}}\n")
    assert complaint("serve", "--graph", str(path)) == (
        f"{path}: roles.aggregated.replicas: must be >= 0, got -1"
    )
    path.write_text("model: demo\nroles: {aggregated: {weight_dtype: fp7}}\n")
    assert "weight_dtype: there is no number format 'fp7'; did you mean 'fp8'?" in complaint(
        "serve", "--graph", str(path)
    )
    path.write_text("model: demo\nmodel: demo\n")
    assert "key 'model' is written twice" in complaint("serve", "--graph", str(path))


def test_help_is_quick():
    command = [sys.executable, "-X", "importtime", "-m", "penstock", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "aiohttp", "pydantic"}


def test_supervisor_and_frontends_do_not_import_torch():
    code = "import penstock.deploy.commands.serve, penstock.deploy.processes.frontend_process, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout == "False\n"
