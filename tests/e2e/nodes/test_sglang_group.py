"""A worker of the fake SGLang over two nodes: its processes end in every way that SGLang's do, under streams."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.engine_servers import FAILING, engine_path
from tests.support.groups import TIMEOUT_S, TOKENS, child, ready, running, stream, text_of, until
from tests.support.registries import free_port

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ROLE = {
    "engine": {"name": "sglang", "args": {"device": "cpu"}}, "nodes": 2, "tensor_parallel": 2, "max_running_requests": 8,
}  # fmt: skip
ON_ONE_NODE = ("--set", "roles.aggregated.nodes=1", "--set", "roles.aggregated.tensor_parallel=1")
STREAMS = 3
SUPERVISION = {"spare_processes": 0, "restart_delay_s": 0.1, "restart_delay_max_s": 0.5}


def rank_of(process: psutil.Process) -> psutil.Process | None:
    """Give the process of SGLang's that computes."""
    children = process.children(recursive=True)
    return next((each for each in children if "rank" in each.cmdline()), None)


def launcher_of(process: psutil.Process) -> psutil.Process:
    return next(each for each in process.children() if "sglang.launch_server" in each.cmdline())


@pytest.mark.needs("curl")
def test_the_group_lives_ends_and_drains_as_one(node, tmp_path: Path) -> None:
    leader, follower, other = nodes = node("lead"), node("follow"), node("other")
    failing = tmp_path / "failing"
    for each in nodes:
        each.environment |= engine_path(each.folder)
    follower.environment[FAILING] = str(failing)
    hub, address = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    graph = leader.graph(
        roles={"aggregated": ROLE}, supervision=SUPERVISION, router={"policy": "round-robin"}
    )
    second = follower.start("up", graph, "--run", "aggregated", "--node-rank", "1", "--leader", address)
    first = leader.start("up", graph, "--set", f"runtime.hub={hub}", "--leader", address)
    url = re.search(r"http://\S+", leader.wait(r"^penstock +ready"))[0]
    follower.wait(r"^follower-1 +ready +sglang  node 1 of 2")
    undisturbed = text_of(stream(url))
    assert undisturbed[1] == TOKENS
    other.start("up", graph, "--join", hub, "--run", "aggregated=1", *ON_ONE_NODE)
    other.wait(r"^penstock +ready")
    both = {"worker-1@lead", "worker-1@other"}
    ended = r"^follower-1 +failed +sglang: its launcher of this node ended"
    until(lambda: ready(url) == both)
    for end, up, said in (
        (lambda: rank_of(child(second, "follower-1")).kill(), follower, ended),  # as by the kernel without memory
        (failing.touch, follower, ended),  # as at an exception: SIGQUIT to the parent
        (lambda: launcher_of(child(first, "worker-1")).kill(), leader, r"^worker-1 +failed .*sglang: its server ended"),
    ):  # fmt: skip
        before = [rank_of(child(first, "worker-1")), rank_of(child(second, "follower-1"))]
        streams = [stream(url) for _ in range(STREAMS)]
        until(lambda: running(url, "worker-1@lead"))
        end()
        up.wait(said)
        counts = [text_of(each)[1] for each in streams]
        assert counts == [TOKENS] * STREAMS, "moved: the fake's text depends on where its prompt ends"
        until(lambda before=before: not any(each.is_running() for each in before))
        until(lambda: ready(url) == both)
    streams = [stream(url) for _ in range(STREAMS)]
    until(lambda: running(url, "worker-1@lead"))
    second.send_signal(signal.SIGTERM)  # told to end: the worker finishes its requests first
    assert [text_of(each) for each in streams] == [undisturbed] * STREAMS
    assert second.wait(timeout=TIMEOUT_S) == 0
    leader.wait(r"^worker-1 +failed +a node of this worker is shutting down; the worker has drained")
    until(lambda: ready(url) == {"worker-1@other"})
    assert text_of(stream(url)) == undisturbed
