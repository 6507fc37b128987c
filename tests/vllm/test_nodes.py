"""A vLLM worker over two nodes, by the command lines of `penstock render`: two network namespaces without common memory.

Beside it runs a worker of one node, which goes on with the requests of one that loses a node.
"""

import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.options import Mount, RenderOptions
from penstock.graph import Graph
from tests.support.cable import cable
from tests.support.host import Host
from tests.support.registries import Etcd

pytestmark = [pytest.mark.needs("ip", "curl", "namespaces", "etcd"), pytest.mark.alone, pytest.mark.nightly]
ROLE = {
    "engine": "vllm", "nodes": 2, "tensor_parallel": 2, "kv_blocks": 64, "weight_dtype": "float32",
    "engine_args": {"enforce_eager": True},
}  # fmt: skip
ON_ONE_NODE = ("roles.aggregated.nodes=1", "roles.aggregated.tensor_parallel=1")
START_S = 500.0
TOKENS, STREAMS = 400, 3


class Pod(Host):
    """A container of a rendered pod in a namespace, without memory in common with others."""

    def __init__(self, name: str, address: str, folder: Path, stack: ExitStack, **variables: str) -> None:
        super().__init__(name, folder, stack)
        self.address = address
        self.process: subprocess.Popen[str] | None = None
        self._variables = {"POD_IP": address} | variables

    def command(self, *words: str) -> list[str]:
        own = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return super().command("unshare", "--mount", "bash", "-c", own, "pod", *words)

    def environment(self, secret: str) -> dict[str, str]:
        return super().environment(secret) | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def run(self, template: dict[str, Any], graph: Path, *settings: str) -> None:
        """Start the container as its template says; `settings` are beside it, as pods of a test share namespaces."""
        (container,) = template["spec"]["containers"]
        command, _, *words = container["args"]
        for name, value in self._variables.items():
            words = [word.replace(f"$({name})", value) for word in words]
        assert not any("$(" in word for word in words)
        flags = [flag for setting in settings for flag in ("--set", setting)]
        self.process = self.start(sys.executable, "-m", "penstock", command, str(graph), *words, *flags)

    def child(self, name: str) -> psutil.Process | None:
        """Give the supervisor's process of this name."""
        assert self.process is not None, "started"
        children = psutil.Process(self.process.pid).children()
        return next((child for child in children if name in child.cmdline()), None)

    def wait_long(self, pattern: str) -> None:
        """Wait for a line; engines of several processes share the cores."""
        until_s = time.monotonic() + START_S
        while True:
            try:
                self.wait(pattern)
            except queue.Empty:
                assert time.monotonic() < until_s, self.lines
            else:
                return

    def kill_all(self) -> None:
        """Kill the supervisor, with which its processes end."""
        assert self.process is not None, "started"
        self.process.kill()

    def kill(self, name: str) -> None:
        child = self.child(name)
        assert child is not None
        child.kill()

    def chat(self, url: str) -> "subprocess.Popen[str]":
        body = {
            "model": "tiny-llama", "messages": [{"role": "user", "content": "Tell me of the quick brown fox"}], "temperature": 0,
            "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        words = ("curl", "-sSN", "-H", "Content-Type: application/json", "-d", json.dumps(body))
        process = subprocess.Popen(
            self.command(*words, f"{url}/v1/chat/completions"), stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(process.kill)
        return process


def text_of(stream: "subprocess.Popen[str]") -> tuple[str, int]:
    out, _ = stream.communicate(timeout=START_S)
    events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
    assert events, out
    assert all("error" not in event for event in events), out[-500:]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text, events[-1]["usage"]["completion_tokens"]


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_streams_outlive_both_nodes_of_a_worker_and_the_group_comes_back(
    model_dir: Path, tmp_path: Path
) -> None:
    with cable() as laid, ExitStack() as stack:
        first, second = ((name, address) for name, address in zip(laid.names, laid.addresses, strict=True))
        etcd = Etcd(host=first[1], prefix=("ip", "netns", "exec", first[0]))
        stack.callback(etcd.kill)
        etcd.start()
        graph = Graph.model_validate({
            "name": "span", "model": str(model_dir), "block_size": 32, "roles": {"aggregated": ROLE}, "router": {"policy": "round-robin"},
            "runtime": {"discovery": "etcd", "urls": [etcd.url]}, "supervision": {"spare_processes": 0},
        })  # fmt: skip
        options = RenderOptions(mounts=(Mount(path=str(model_dir), kind="host", name=str(model_dir)),))
        objects = {each["kind"]: each for each in kubernetes_objects(graph, options)}
        file = tmp_path / "graph.yaml"
        file.write_text(objects["ConfigMap"]["data"]["graph.yaml"])
        group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
        frontend = Pod(*first, tmp_path / "frontend", stack)
        leader = Pod(*first, tmp_path / "leader", stack)
        variables = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": first[1]}
        follower = Pod(*second, tmp_path / "follower", stack, **variables)
        single = Pod(*second, tmp_path / "single", stack)
        follower.run(group["workerTemplate"], file)  # the follower first
        leader.run(group["leaderTemplate"], file)
        leader.wait_long("^worker-1 +ready")
        frontend.run(objects["Deployment"]["spec"]["template"], file, "runtime.probes=null")
        frontend.wait_long("^penstock +ready")
        url = f"http://{first[1]}:8000"
        undisturbed = text_of(frontend.chat(url))
        assert undisturbed[1] == TOKENS
        single.run(group["leaderTemplate"], file, "runtime.probes=null", *ON_ONE_NODE)
        single.wait_long("^worker-1 +ready")

        def workers() -> dict[str, dict[str, Any]]:
            return {each["name"]: each for each in frontend.get(f"{url}/admin/workers")["workers"]}

        def ready() -> set[str]:
            return {name for name, each in workers().items() if each["condition"] == "ready"}

        def running(name: str) -> int:
            return int((workers().get(name, {}).get("load") or {}).get("running_requests", 0))

        spanning, other = "worker-1@leader", "worker-1@single"
        until(lambda: ready() == {spanning, other})
        for pod, child in ((follower, "follower-1"), (leader, "worker-1")):
            streams = [frontend.chat(url) for _ in range(STREAMS)]
            until(lambda: running(spanning))
            pod.kill(child)
            until(lambda: ready() == {other})
            assert [text_of(stream) for stream in streams] == [undisturbed] * STREAMS
            until(lambda: ready() == {spanning, other})
        single.kill_all()
        until(lambda: ready() == {spanning})
        assert text_of(frontend.chat(url)) == undisturbed, "the group that came back computes as before"
