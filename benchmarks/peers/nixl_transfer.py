"""NVIDIA's NIXL between two processes, for `python -m benchmarks transfer`: run by the Python that has nixl-cu12.

    nixl_transfer.py POOL_BYTES DELAY_US|polled

The delay is that of NIXL's progress thread; `polled` is without one. A line of JSON in, one out: {"op": "write",
"count": 2048, "bytes": 32768, "seed": 0, "reps": 5} gives {"seconds": [...]}, from posting a prepared request to its
end, the first one left out; {"op": "idle", "seconds": 2} gives the share of a core that the target takes meanwhile.
A target without a progress thread polls all the time, as NIXL wants it; so between measurements both processes are best
stopped (SIGSTOP to their group).
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
from nixl_cu12 import _bindings as nixl  # its own Python API sets the delay to 0

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
PR_SET_PDEATHSIG = 1


class Agent:
    def __init__(self, name: str, pool_bytes: int, delay_us: int | None) -> None:
        config = nixl.nixlAgentConfig()
        config.useProgThread = delay_us is not None
        config.pthrDelay = delay_us or 0
        self.agent = nixl.nixlAgent(name, config)
        self.backend = self.agent.createBackend("UCX", {})
        self.pool = np.ones(pool_bytes, np.uint8)
        described = nixl.nixlRegDList(nixl.DRAM_SEG, [(self.pool.ctypes.data, pool_bytes, 0, "")])
        self.agent.registerMem(described, [self.backend])


def serve(pool_bytes: int, delay_us: int | None) -> None:
    """Own the target's memory until the initiator has gone."""
    own = Agent("target", pool_bytes, delay_us)
    print(json.dumps({"metadata": own.agent.getLocalMD().hex(), "address": own.pool.ctypes.data}), flush=True)
    own.agent.loadRemoteMD(bytes.fromhex(sys.stdin.readline()))
    print("{}", flush=True)
    os.set_blocking(sys.stdin.fileno(), delay_us is not None)
    while True:
        try:
            line = os.read(sys.stdin.fileno(), 4096)
        except BlockingIOError:
            own.agent.getNotifs({}, [])
            continue
        if not line:
            return
        began_s, cpu_s = time.perf_counter(), time.process_time()
        while time.perf_counter() - began_s < json.loads(line):
            if delay_us is not None:
                time.sleep(0.05)
            else:
                own.agent.getNotifs({}, [])
        share = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
        print(json.dumps({"share": share}), flush=True)


class Initiator:
    def __init__(self, pool_bytes: int, delay_us: int | None, target: subprocess.Popen[str]) -> None:
        assert target.stdin
        assert target.stdout
        self.target = target
        self.own = Agent("initiator", pool_bytes, delay_us)
        there = json.loads(target.stdout.readline())
        self.address = there["address"]
        self.peer = self.own.agent.loadRemoteMD(bytes.fromhex(there["metadata"])).decode()
        target.stdin.write(self.own.agent.getLocalMD().hex() + "\n")
        target.stdin.flush()
        target.stdout.readline()
        self.requests: dict[tuple[str, int, int], int] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["op"] == "idle":
            assert self.target.stdin
            assert self.target.stdout
            self.target.stdin.write(f"{asked['seconds']}\n")
            self.target.stdin.flush()
            share: dict[str, Any] = json.loads(self.target.stdout.readline())
            return share
        request = self.request(asked["op"], asked["count"], asked["bytes"], asked["seed"])
        agent, busy = self.own.agent, nixl.NIXL_IN_PROG
        seconds = []
        for _ in range(asked["reps"] + 1):
            began_s = time.perf_counter()
            state = agent.postXferReq(request)
            while state == busy:
                state = agent.getXferStatus(request)
            seconds.append(time.perf_counter() - began_s)
        return {"seconds": seconds[1:]}

    def request(self, op: str, count: int, size: int, seed: int) -> int:
        key = op, count, size
        if key not in self.requests:
            slots = len(self.own.pool) // size
            random = np.random.default_rng(seed)
            here, there = (random.permutation(slots)[:count].astype(np.uint64) for _ in range(2))
            lists = []
            for name, base, slot in (
                (nixl.NIXL_INIT_AGENT, self.own.pool.ctypes.data, here),
                (self.peer, self.address, there),
            ):
                rows = np.zeros((count, 3), np.uint64)
                rows[:, 0] = np.uint64(base) + slot * np.uint64(size)
                rows[:, 1] = size
                ranges = nixl.nixlXferDList(nixl.DRAM_SEG, rows)
                lists.append(self.own.agent.prepXferDlist(name, ranges, [self.own.backend]))
            every = np.arange(count, dtype=np.int32)
            kind = nixl.NIXL_WRITE if op == "write" else nixl.NIXL_READ
            self.requests[key] = self.own.agent.makeXferReq(
                kind, lists[0], every, lists[1], every, "", [self.own.backend]
            )
        return self.requests[key]


def main(pool_bytes: int, delay_us: int | None) -> None:
    command = [sys.executable, __file__, *sys.argv[1:3], "target"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        try:
            initiator = Initiator(pool_bytes, delay_us, target)
            print("{}", flush=True)
            for line in sys.stdin:
                print(json.dumps(initiator.answer(json.loads(line))), flush=True)
        finally:
            target.kill()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL
    )  # who is stopped would outlive a parent that was killed
    arguments = int(sys.argv[1]), None if sys.argv[2] == "polled" else int(sys.argv[2])
    if sys.argv[3:] == ["target"]:
        serve(*arguments)
    else:
        main(*arguments)
