"""Stock vLLM servers on the CPU: `vllm serve` as it is, one process group each."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

NAME = "tiny-served"
BLOCK = 32
START_S = 240.0


def own_cores() -> list[int]:
    """List the cores, those first that the tests of this process shall use: each process that shares them begins elsewhere."""
    cores = sorted(os.sched_getaffinity(0))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(cores)
    return cores[first:] + cores[:first]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class VllmServer:
    process: subprocess.Popen[bytes]
    url: str
    events: str
    replay: str

    def kill(self) -> None:
        """Kill the server and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_server(
    model_dir: Path, core: int, log: Path, flags: Sequence[str] = (), environment: Mapping[str, str] = {}
) -> VllmServer:
    ports = [free_port() for _ in range(3)]
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[1]}",
        "replay_endpoint": f"tcp://*:{ports[2]}",
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(ports[0]), "--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager",
        "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events), *flags,
    ]  # fmt: skip
    given = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=given | dict(environment),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    local = "tcp://127.0.0.1"
    return VllmServer(process, f"http://127.0.0.1:{ports[0]}", f"{local}:{ports[1]}", f"{local}:{ports[2]}")


@contextmanager
def running_servers(
    model_dir: Path, logs: Path, settings: Sequence[tuple[Sequence[str], Mapping[str, str]]]
) -> Iterator[list[VllmServer]]:
    """Run a server for each pair of flags and environment, each on a core of its own as far as there are."""
    cores = own_cores()
    started = [
        start_server(model_dir, cores[number % len(cores)], logs / f"{number}.log", flags, environment)
        for number, (flags, environment) in enumerate(settings)
    ]

    async def wait() -> None:
        async with aiohttp.ClientSession() as http, asyncio.timeout(START_S):
            for number, server in enumerate(started):
                while True:
                    assert server.process.poll() is None, (logs / f"{number}.log").read_text()[-3000:]
                    with suppress(aiohttp.ClientError):
                        async with http.get(f"{server.url}/health") as response:
                            if response.status == 200:
                                break
                    await asyncio.sleep(0.5)

    try:
        asyncio.run(wait())
        yield started
    finally:
        for server in started:
            server.kill()


class RouterProcess:
    """`penstock router` beside running servers."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url = url
        self._process = process

    async def ask(self, http: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
        headers = {"X-Penstock-Explain": "1"}
        async with http.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()  # type: ignore[no-any-return]

    async def workers(self, http: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
        async with http.get(f"{self.url}/workers") as answer:
            return {worker["name"]: worker for worker in (await answer.json())["workers"]}

    async def ready(self, http: aiohttp.ClientSession, *names: str) -> None:
        async with asyncio.timeout(60):
            while True:
                workers = await self.workers(http)
                if all(workers.get(name, {}).get("condition") in {"ready", "prefill_only"} for name in names):
                    return
                await asyncio.sleep(0.05)


@contextmanager
def running_router(model_dir: Path, *flags: str) -> Iterator[RouterProcess]:
    command = [
        sys.executable,
        "-m",
        "penstock",
        "router",
        str(model_dir),
        "--port",
        "0",
        "--block-size",
        str(BLOCK),
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.split()[:2] == ["router", "ready"])
        yield RouterProcess(process, line.split()[2])
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0
