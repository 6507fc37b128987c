"""The servers to compare: Penstock with vLLM workers, and vLLM's own OpenAI server, with equal engine arguments.

The model is random, of 5 million parameters in float32, so what is measured is everything but the model.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes.engine import SIZES
from benchmarks.processes.served import Served, served
from penstock.core.errors import ConfigError, Unavailable

BLOCK = 32
CONTEXT = 4096
_ENGINE = {"enforce_eager": True, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_START_TIMEOUT_S = 600.0


@contextlib.contextmanager
def checkpoint(seed: int) -> Iterator[Path]:
    """Make the model, and set the environment of all servers.

    Raises:
        ConfigError: vLLM or the packages for its checkpoint are not installed.
    """
    missing = [
        package for package in ("vllm", "torch", "transformers") if importlib.util.find_spec(package) is None
    ]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed here; run it by the Python of an environment with vLLM and Penstock,"
            " such as that of `make test-vllm`"
        )
    from tests.support.checkpoints import make_checkpoint  # noqa: PLC0415 - its packages are an extra

    os.environ.update(_CPU)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        yield make_checkpoint(Path(directory) / "llama-5m", "llama", seed=seed, **SIZES)


def described(blocks: int) -> dict[str, Any]:
    """Give what a report says of the engines; `blocks` are each one's KV blocks."""
    return {
        "model": SIZES | {"architecture": "llama", "dtype": "float32"},
        "engine_args": _ENGINE | {"block_size": BLOCK, "kv_blocks": blocks},
        "environment": _CPU,
        "versions": {name: _version(name) for name in ("vllm", "torch", "transformers")},
    }


def penstock(
    model: Path, blocks: int, *, workers: int, policy: str
) -> contextlib.AbstractContextManager[Served]:
    """Run Penstock; each worker has `blocks` KV blocks."""
    role = {"kv_blocks": blocks, "weight_dtype": "float32"}
    settings = {f"roles.aggregated.{name}": value for name, value in role.items()}
    settings |= {"block_size": BLOCK, "context_length": CONTEXT}
    return served(
        str(model), "--engine", "vllm", f"--workers={workers}", f"--policy={policy}",
        *(f"--engine-arg={name}={str(value).lower()}" for name, value in _ENGINE.items() if name == "enforce_eager"),
        f"--set=roles.aggregated.max_running_requests={_ENGINE['max_num_seqs']}",
        f"--set=roles.aggregated.max_batch_tokens={_ENGINE['max_num_batched_tokens']}",
        *(f"--set={name}={value}" for name, value in settings.items()),
    )  # fmt: skip


@contextlib.contextmanager
def vllm(model: Path, blocks: int) -> Iterator[Served]:
    """Run vLLM's OpenAI server with the arguments that Penstock's adapter gives to its engine."""
    given = {
        "model": model, "block-size": BLOCK, "max-model-len": CONTEXT, "num-gpu-blocks-override": blocks,
        "dtype": "float32", "max-num-seqs": _ENGINE["max_num_seqs"], "kv-cache-memory-bytes": 1 << 30,
        "max-num-batched-tokens": _ENGINE["max_num_batched_tokens"], "prefix-caching-hash-algo": "sha256_cbor",
        "scheduling-policy": "priority", "served-model-name": "m", "host": "127.0.0.1", "port": (port := _free_port()),
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--disable-log-stats",
    ]
    command += [f"--{name}={value}" for name, value in given.items()]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"VLLM_HOST_IP": "127.0.0.1"}
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url)
            yield Served(url, "m")
        except Unavailable:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise
        finally:
            _end(process)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait(process: "subprocess.Popen[bytes]", url: str) -> None:
    give_up_s = time.perf_counter() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        if process.poll() is not None or time.perf_counter() > give_up_s:
            raise Unavailable("vLLM's server did not become ready; its last words stand above")
        time.sleep(0.5)


def _end(process: "subprocess.Popen[bytes]") -> None:
    every = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    for one in every:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"
