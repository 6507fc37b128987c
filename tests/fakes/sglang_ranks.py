"""Ranks of the fake `sglang` over nodes: a process on each node; all meet at `dist_init_addr`, and none notices that another ends."""

import ctypes
import multiprocessing
import os
import signal
import socket
import time
from typing import Any

FAILING = "FAKE_SGLANG_FAILING"
"""Variable with a path: a rank fails once the file is there, as at an exception, and removes it."""
_WAIT_S = 60.0


def join_ranks(args: Any) -> None:
    """Start this node's rank, and wait until those of all nodes have met, as `Engine` does."""
    if args.node_rank > 0 and os.environ.get("SGLANG_BLOCK_NONZERO_RANK_CHILDREN") != "0":
        raise NotImplementedError("this fake has no port for health checks")
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    rank = spawn.Process(target=_run, args=(args.dist_init_addr, args.nnodes, args.node_rank, there))
    rank.start()
    there.close()
    try:
        here.recv()
    except EOFError:
        rank.join()
        raise RuntimeError(
            f"Rank 0 scheduler died during initialization (exit code: {rank.exitcode})."
        ) from None


def _run(address: str, nodes: int, node: int, ready: Any) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, as SGLang
    host, _, port = address.rpartition(":")
    others = []
    if node == 0:
        with socket.create_server((host, int(port))) as server:
            server.settimeout(_WAIT_S)
            others = [server.accept()[0] for _ in range(nodes - 1)]
        for other in others:
            other.sendall(b"1")
    else:
        others = [_connected(host, int(port))]
        if not others[0].recv(1):
            raise ConnectionError("rank 0 went away")
    ready.send("ready")
    failing = os.environ.get(FAILING, "")
    while True:
        time.sleep(0.05)
        if failing and os.path.exists(failing):  # noqa: PTH110
            os.unlink(failing)  # noqa: PTH108
            print("Scheduler hit an exception: a test", flush=True)
            os.kill(os.getppid(), signal.SIGQUIT)
            return


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=_WAIT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
