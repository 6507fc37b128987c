"""`penstock serve` as people run it: what it prints, how it ends, and what it says to wrong input."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from penstock.deploy.state import load_admin_token
from tests.support.host import until
from tests.support.up import TIMEOUT_S, Up

pytestmark = pytest.mark.slow
MODEL = "penstock-demo"


class Serve(Up):
    """Runs `penstock serve --engine mock`."""

    def serve(self, *flags: str) -> subprocess.Popen[str]:
        usual = ("--engine", "mock", "--port", "0", "--set", "supervision.spare_processes=0")
        return self.start("serve", *usual, *flags)

    def wait_ready(self) -> str:
        """Wait until it serves; give its URL."""
        return re.search(r"http://\S+", self.wait(r"^penstock +ready"))[0]


@pytest.fixture
def up(tmp_path, runtime_dir):
    made = Serve(tmp_path, runtime_dir)
    made.environment["PENSTOCK_STATE_DIR"] = str(tmp_path)
    yield made
    made.end()


def get(url):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {load_admin_token()}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def workers_of(url):
    return json.loads(get(f"{url}/admin/workers"))["workers"]


def ready_ids(url):
    return {worker["worker_id"] for worker in workers_of(url) if worker["condition"] == "ready"}


def chat_stream(url, max_tokens):
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def test_the_first_chat_and_every_change_of_state_are_shown(up):
    process = up.serve("--workers", "2", "--first-chat")
    url = up.wait_ready()
    assert up.lines[0].split() == ["penstock", "starting", "model", MODEL]
    assert sorted(line.split()[0] for line in up.lines[1:-1]) == ["frontend-1", "worker-1", "worker-2"]
    said = "\n".join(up.lines)
    assert re.search(r"(?m)^worker-1 +ready +mock  penstock-demo  \d+ blocks  \d+\.\d s$", said)
    up.wait(r"^you> What is Penstock\?")
    up.wait(rf"^{MODEL}> \S+")
    up.wait(f"curl {url}/v1/chat/completions")
    up.wait(f"curl {url}/metrics")
    assert "penstock_frontend" in get(f"{url}/metrics")

    (first, _) = workers_of(url)
    os.kill(first["pid"], signal.SIGKILL)
    up.wait(rf"^{first['name']} +failed +killed by SIGKILL; starts again in 0\.2 s")
    up.wait(rf"^{first['name']} +ready")
    until(lambda: len(ready_ids(url) - {first["worker_id"]}) == 2)
    process.send_signal(signal.SIGINT)
    assert up.ended() == 0
    assert up.lines[-1].split() == ["penstock", "stopped"]


def test_sigterm_finishes_streams_and_leaves_nothing(up, runtime_dir):
    process = up.serve("--workers", "2")
    url = up.wait_ready()
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4, "two workers, a frontend and the guard of their process groups"

    def is_refused():
        try:
            get(f"{url}/live")
        except (urllib.error.URLError, ConnectionError):
            return True
        return False

    with chat_stream(url, max_tokens=1000) as response:
        first = response.readline()
        process.send_signal(signal.SIGTERM)
        up.wait(r"^penstock +stopping")
        until(is_refused)  # a new connection, while the old stream goes on
        rest = response.read()
    events = [json.loads(line[6:]) for line in (first + rest).splitlines() if line.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert up.ended() == 0
    assert not any(child.is_running() for child in children)
    assert list(runtime_dir.iterdir()) == []


def test_a_second_signal_does_not_wait(up):
    process = up.serve()
    with chat_stream(up.wait_ready(), max_tokens=4000) as response:
        response.readline()
        process.send_signal(signal.SIGINT)
        up.wait(r"^penstock +stopping")
        process.send_signal(signal.SIGINT)
        assert b"the server is shutting down" in response.read()
        assert up.ended() == 0


def test_a_signal_while_it_starts_ends_it(up, runtime_dir):
    process = up.serve("--workers", "2")
    until(psutil.Process(process.pid).children)
    process.send_signal(signal.SIGTERM)
    assert up.ended() == 0
    assert list(runtime_dir.iterdir()) == []


def test_it_serves_on_when_nobody_reads_its_lines(up):
    command = [sys.executable, "-m", "penstock", "serve", "--engine", "mock", "--port", "0"]
    command += ["--set", "supervision.spare_processes=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = next(line for line in process.stdout if re.match("penstock +ready", line))
        url = re.search(r"http://\S+", said)[0]
        process.stdout.close()  # the pipe has no reader any more
        (first,) = workers_of(url)
        os.kill(first["pid"], signal.SIGKILL)
        until(lambda: ready_ids(url) - {first["worker_id"]})
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_mistakes_are_one_line_and_start_nothing(up, tmp_path: Path):
    """As tests/unit/cli/test_cli.py has them; here by the real command, and what only a start finds."""

    def complaint(*words: str) -> str:
        done = up.run("serve", *words, check=False)
        assert done.returncode == 2, done
        assert re.fullmatch(r"(penstock +starting +model \S+\n)?", done.stdout)
        assert not (done.stdout and "no such directory" in done.stderr), "nothing starts then"
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr.removeprefix("penstock: ").rstrip()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = f"frontend.port: {port} on 127.0.0.1 is in use; stop what listens there, or choose another"
        assert complaint("--engine", "mock", "--port", str(port)).startswith(in_use)
    assert "no such directory: ./absent" in complaint("./absent", "--port", "0")
    wrong = ("--workers", "2", "--set", "roles.aggregated.mock.kv_bytes_per_block=5")
    assert "kv_bytes_per_block" in complaint("--engine", "mock", "--port", "0", *wrong), "the engine tells"
    path = tmp_path / "graph.yaml"
    path.write_text("model: demo\nmodel: demo\n")
    assert "key 'model' is written twice" in complaint("--graph", str(path))


def imported_by(*words: str) -> set[str]:
    """Give the modules that a program imports."""
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_help_supervisor_and_frontends_import_nothing_large():
    assert not imported_by("-m", "penstock", "--help") & {"torch", "transformers", "aiohttp", "pydantic"}
    code = "import penstock.cli.serve, penstock.deploy.processes.frontend_process"
    assert "torch" not in imported_by("-c", code)
