"""The two sides: `penstock serve` with mock workers, and Dynamo's frontend with its mocker; neither needs a service."""

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes.served import served
from penstock.core.errors import Unavailable

_START_S_MAX = 60.0
_STOP_S_MAX = 10.0
_BATCH = {"max_running_requests": 256, "max_batch_tokens": 8192}
"""Limits of a worker's batch: what Dynamo's mocker has by default."""
_FREE_PREFILL = (
    "mock.timing.prefill_s_per_token=0",
    "mock.timing.prefill_s_per_token2=0",
    "mock.timing.decode_s_per_context_token=0",
)


@dataclass(frozen=True, slots=True)
class Server:
    """A frontend process, where it listens, and the model's name."""

    name: str
    port: int
    model: str
    pid: int


@contextlib.contextmanager
def ours(
    model: Path, *, speedup: float = 1e6, frontends: int = 1, free_prefill: bool = False
) -> Iterator[Server]:
    """Serve with two mock workers; `speedup` divides their step of 3.5 ms. `pid` is the first frontend's.

    With `free_prefill` a step takes 65,536 prompt tokens and is no longer for them.
    """
    flags = [
        "--engine",
        "mock",
        "--mock-speedup",
        str(speedup),
        "--workers",
        "2",
        "--frontend-processes",
        str(frontends),
    ]
    batch = _BATCH | ({"max_batch_tokens": 65_536} if free_prefill else {})
    settings = [f"{name}={value}" for name, value in batch.items()]
    for setting in (*settings, *(_FREE_PREFILL if free_prefill else ())):
        flags += ["--set", f"roles.aggregated.{setting}"]
    with served(str(model), *flags) as deployment:
        children = Path(f"/proc/{deployment.pid}/task/{deployment.pid}/children").read_text().split()
        (pid,) = (
            int(child)
            for child in children
            if Path(f"/proc/{child}/comm").read_text().strip() == "frontend-1"
        )
        yield Server("ours", int(deployment.url.rpartition(":")[2]), deployment.model, pid)


@contextlib.contextmanager
def peer(python: Path, model: Path, directory: Path, *, speedup: float) -> Iterator[Sequence[Server]]:
    """Serve the same with Dynamo, by the Python that has it; nothing where it is not installed.

    Its defaults but: discovery by files, every socket on the loopback, the KV router, and warnings alone in the log.
    """
    if not python.exists():
        yield ()
        return
    port = _free_port()
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
    environment = os.environ | dict.fromkeys(hosts, "127.0.0.1") | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(directory / f"discovery-{port}"),
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    mocker = ["dynamo.mocker", "--model-path", str(model), "--model-name", "bench", "--num-workers", "2"]
    mocker += ["--speedup-ratio", str(speedup), "--block-size", "16", "--num-gpu-blocks-override", "65536"]
    frontend = [
        "dynamo.frontend",
        "--router-mode",
        "kv",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(port),
    ]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((directory / "peer.log").open("wb"))
        pids = []
        for module in (mocker, frontend):
            process = subprocess.Popen([str(python), "-m", *module], env=environment, stdout=log, stderr=log)
            stack.callback(_stop, process)
            pids.append(process.pid)
        _wait_for_model(port, directory / "peer.log")
        yield [Server("peer", port, "bench", pids[-1])]


def _wait_for_model(port: int, log: Path) -> None:
    until_s = time.monotonic() + _START_S_MAX
    while time.monotonic() < until_s:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer,
        ):
            if b'"bench"' in answer.read():
                return
        time.sleep(0.2)
    raise Unavailable(
        f"the peer lists no model after {_START_S_MAX:g} s: {log.read_text(errors='replace')[-500:]}"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
