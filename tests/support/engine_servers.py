"""Fakes of SGLang's and TensorRT-LLM's servers as programs: they take the command lines and the bodies that these document, and no other.

    python -m tests.support.engine_servers sglang|trtllm ARGUMENTS

Over several nodes SGLang's fake has a rank on each node; the ranks meet at `--dist-init-addr`, and the launcher of a node ends with its
rank. A follower's launcher answers health checks alone.
"""

import argparse
import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from tokenizers import Tokenizer

from tests.support.fake_server import FakeServer

DATA = Path(__file__).parents[1] / "data"
ROOT = Path(__file__).parents[2]
FAILING = "FAKE_SGLANG_FAILING"
"""Variable with a path: a rank fails once the file is there, as at an exception, and removes it."""
TOKEN_S = 0.01
_WAIT_S = 60.0
_FLAGS = ("enable_", "disable_", "skip_", "trust_remote_code", "incremental_streaming_output")
"""How the names of SGLang's arguments without a value begin."""


def engine_path(folder: Path) -> dict[str, str]:
    """Make the package `sglang` and the program `trtllm-serve` in a folder; give the variables of processes that find them."""
    package, programs = folder / "sglang", folder / "bin"
    package.mkdir()
    programs.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.5.23"\n')
    run = "import sys\nfrom tests.support.engine_servers import main\nsys.exit(main([{!r}, *sys.argv[1:]]))\n"
    (package / "launch_server.py").write_text(run.format("sglang"))
    program = programs / "trtllm-serve"
    program.write_text(f"#!{sys.executable}\n{run.format('trtllm')}")
    program.chmod(0o755)
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def main(words: list[str]) -> int:
    if words[0] == "rank":
        return run_rank(words[1], int(words[2]), int(words[3]))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that is killed leaves nothing
    if words[0] == "sglang":
        return asyncio.run(run_sglang(sglang_arguments(words[1:])))
    return asyncio.run(run_trtllm(*trtllm_arguments(words[1:])))


# -- SGLang


def sglang_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch_server.py", allow_abbrev=False)
    for name in (DATA / "sglang" / "server_args.txt").read_text().split():
        flag = f"--{name.replace('_', '-')}"
        if name.startswith(_FLAGS):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, nargs="+" if name in {"lora_paths", "cuda_graph_bs_decode"} else None)
    parser.add_argument("--stream-output", action="store_true", dest="incremental_streaming_output")
    return parser.parse_args(words)


async def run_sglang(arguments: argparse.Namespace) -> int:
    ranks: list[subprocess.Popen[bytes]] = []
    if int(arguments.nnodes or 1) > 1:
        place = [arguments.dist_init_addr, arguments.nnodes, arguments.node_rank]
        words = [sys.executable, "-m", "tests.support.engine_servers", "rank", *place]
        rank = subprocess.Popen(words, stdout=subprocess.PIPE)  # noqa: ASYNC220
        assert rank.stdout is not None
        if await asyncio.to_thread(rank.stdout.readline) != b"ready\n":
            print(f"Rank 0 scheduler died during initialization (exit code: {rank.wait()}).", flush=True)
            return 1
        ranks.append(rank)
    failed = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGQUIT, failed.set
    )  # what a rank sends when it fails
    port = int(arguments.port)
    if int(arguments.node_rank or 0) > 0:
        await _serve_health(port)
    else:
        await _serve_sglang(arguments, port)
    while not failed.is_set() and all(rank.poll() is None for rank in ranks):  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.05)
    for rank in ranks:
        rank.kill()
    print("Received sigquit from a child process. It usually means the child failed.", flush=True)
    os._exit(1)


async def _serve_sglang(arguments: argparse.Namespace, port: int) -> None:
    tokenizer = Tokenizer.from_file(str(Path(arguments.model_path) / "tokenizer.json"))
    server = FakeServer(
        tokenizer, "sglang", model=arguments.model_path, context_length=int(arguments.context_length), port=port,
        is_paired=arguments.disaggregation_mode != "null", token_s=TOKEN_S,
    )  # fmt: skip
    server.key = arguments.api_key
    if arguments.enable_metrics and arguments.max_total_tokens:
        server.metrics = f"sglang:max_total_num_tokens {arguments.max_total_tokens}\n"
    if arguments.kv_events_config is not None:
        server.publish = _publisher(json.loads(arguments.kv_events_config), int(arguments.page_size))
    await server.start()


def _publisher(config: dict[str, Any], block_size: int) -> Any:
    zmq, zmq_asyncio = import_module("zmq"), import_module("zmq.asyncio")  # an extra
    assert config["publisher"] == "zmq"
    context = zmq_asyncio.Context()
    sockets: dict[int, Any] = {}
    numbers: dict[int, int] = {}

    def bound(rank: int) -> Any:
        if rank not in sockets:
            endpoint = config["endpoint"]
            if endpoint.startswith("tcp:"):
                assert config["bind"]
                head, _, first = endpoint.rpartition(":")
                endpoint = f"{head}:{int(first) + rank}"
            sockets[rank] = context.socket(zmq.PUB)
            sockets[rank].bind(endpoint)
        return sockets[rank]

    bound(0)

    async def publish(body: dict[str, Any]) -> None:
        rank, tokens = body.get("routed_dp_rank") or 0, body["input_ids"]
        whole = tokens[: len(tokens) // block_size * block_size]
        stored = {
            "type": "BlockStored", "block_hashes": [hash(tuple(whole[: end + block_size])) for end in range(0, len(whole), block_size)],
            "parent_block_hash": None, "token_ids": whole, "block_size": block_size, "lora_id": None, "medium": "GPU",
            "cache_salt": body.get("cache_salt"),
        }  # fmt: skip
        number = numbers[rank] = numbers.get(rank, -1) + 1
        events = [stored] if whole else []
        payload = msgspec.msgpack.encode([time.time(), events, rank])
        await bound(rank).send_multipart([config["topic"].encode(), number.to_bytes(8, "big"), payload])

    return publish


async def _serve_health(port: int) -> None:
    app = web.Application()
    app.add_routes([web.get("/health", lambda _request: _well())])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()


async def _well() -> web.Response:
    return web.Response()


def run_rank(address: str, nodes: int, node: int) -> int:
    """Meet the ranks of the other nodes, and none notices that another ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    host, _, port = address.rpartition(":")
    if node == 0:
        with socket.create_server((host, int(port))) as server:
            server.settimeout(_WAIT_S)
            others = [server.accept()[0] for _ in range(nodes - 1)]
        for other in others:
            other.sendall(b"1")
    else:
        others = [_connected(host, int(port))]
        if not others[0].recv(1):
            return 1
    print("ready", flush=True)
    failing = os.environ.get(FAILING, "")
    while True:
        time.sleep(0.05)
        if failing and os.path.exists(failing):  # noqa: PTH110
            os.unlink(failing)  # noqa: PTH108
            os.kill(os.getppid(), signal.SIGQUIT)
            return 1


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=_WAIT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


# -- TensorRT-LLM


def trtllm_arguments(words: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="trtllm-serve", allow_abbrev=False)
    parser.add_argument("model")
    for name in json.loads((DATA / "trtllm" / "recorded.json").read_text())["serve_options"]:
        parser.add_argument(f"--{name}")
    arguments = parser.parse_args(words)
    options = json.loads(Path(arguments.extra_llm_api_options).read_text())
    known = {*json.loads((DATA / "trtllm" / "llm_args.json").read_text())["arguments"]}
    if unknown := options.keys() - known:
        parser.error(f"Extra inputs are not permitted: {unknown}")
    return arguments, options


async def run_trtllm(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    tokenizer = Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json"))
    server = FakeServer(
        tokenizer, "trtllm", model=Path(arguments.model).name, port=int(arguments.port), token_s=TOKEN_S
    )
    cache = options["kv_cache_config"]
    stats = {"maxNumBlocks": 64, "usedNumBlocks": 1, "tokensPerBlock": cache["tokens_per_block"]}
    server.metrics = json.dumps([{"iter": 1, "kvCacheStats": stats}])
    await server.start()
    await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
