"""A worker of two nodes as processes: each node killed or told to end under streams, and nodes that never come."""

import re
import signal
from pathlib import Path

import pytest

from penstock.cli import main
from tests.support.groups import TIMEOUT_S, TOKENS, child, ready, running, stream, text_of, until
from tests.support.registries import free_port
from tests.support.up import Up

pytestmark = pytest.mark.slow
STREAMS = 3
ONE_NODE = ("--set", "roles.aggregated.nodes=1", "--set", "roles.aggregated.tensor_parallel=1")


def graph_of(up: Up, *, start_timeout_s: float = 600.0, speedup: float = 0.25) -> Path:
    role = {"engine": "mock", "nodes": 2, "tensor_parallel": 2, "mock": {"speedup": speedup}}
    supervision = {
        "spare_processes": 0, "restart_delay_s": 0.1, "restart_delay_max_s": 0.5, "start_timeout_s": start_timeout_s,
    }  # fmt: skip
    router = {"policy": "round-robin"}  # streams are on both workers
    return up.graph(roles={"aggregated": role}, supervision=supervision, router=router)


@pytest.mark.needs("curl")
def test_streams_outlive_each_node_and_the_group_comes_back_whole(node) -> None:
    leader, follower, other = node("lead"), node("follow"), node("other")
    hub, address = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    graph = graph_of(leader)
    second = follower.start("up", graph, "--run", "aggregated", "--node-rank", "1", "--leader", address)
    follower.wait(r"^penstock +starting +model penstock-demo  node 1 of 2")  # the follower first
    first = leader.start("up", graph, "--set", f"runtime.hub={hub}", "--leader", address)
    url = re.search(r"http://\S+", leader.wait(r"^penstock +ready"))[0]
    follower.wait(r"^follower-1 +ready +mock  node 1 of 2")
    undisturbed = text_of(stream(url))
    assert undisturbed[1] == TOKENS
    other.start("up", graph, "--join", hub, "--run", "aggregated=1", *ONE_NODE)
    other.wait(r"^penstock +ready")
    both = {"worker-1@lead", "worker-1@other"}
    until(lambda: ready(url) == both)
    for supervisor, name, said in (
        (second, "follower-1", r"worker-1 +failed +node 1 of 2 .* is lost"),
        (first, "worker-1", None),
    ):
        streams = [stream(url) for _ in range(STREAMS)]
        until(lambda: running(url, "worker-1@lead"))
        before = child(first, "worker-1").pid
        child(supervisor, name).kill()
        if said:
            leader.wait(said)
        assert [text_of(each) for each in streams] == [undisturbed] * STREAMS
        until(lambda before=before: (new := child(first, "worker-1")) is not None and new.pid != before)
        until(lambda: ready(url) == both and child(second, "follower-1") is not None)
    streams = [stream(url) for _ in range(STREAMS)]
    until(lambda: running(url, "worker-1@lead"))
    second.send_signal(signal.SIGTERM)  # told to end: the worker finishes its requests first
    assert [text_of(each) for each in streams] == [undisturbed] * STREAMS
    assert second.wait(timeout=TIMEOUT_S) == 0
    leader.wait(r"^worker-1 +failed +a node of this worker is shutting down; the worker has drained")
    until(lambda: ready(url) == {"worker-1@other"})
    assert text_of(stream(url)) == undisturbed


def test_a_node_that_never_comes_is_named_at_both_ends_and_may_come_later(node) -> None:
    leader, follower = node("lead"), node("follow")
    address = f"tcp://127.0.0.1:{free_port()}"
    graph = graph_of(leader, start_timeout_s=6.0)
    follow = ("up", graph, "--run", "aggregated", "--node-rank", "1", "--leader", address)
    alone = follower.start(*follow)
    follower.wait(
        rf"^follower-1 +failed +node 0 did not take this one at {address} within 6 s: .*; starts again"
    )
    alone.terminate()
    follower.wait(r"^penstock +stopped")
    leader.start("up", graph, "--leader", address)
    leader.wait(
        rf"^worker-1 +failed +node 1 of 2 \(0 is this one\) did not join {address} within 6 s; .*starts again"
    )
    follower.start(*follow)
    leader.wait(r"^penstock +ready")


def test_a_follower_is_listed_and_ended_by_commands(node) -> None:
    follower = node("follow")
    graph, address = graph_of(follower), f"tcp://127.0.0.1:{free_port()}"
    process = follower.start(
        "up", graph, "--run", "aggregated", "--node-rank", "1", "--leader", address, "--set", "name=followed"
    )
    follower.wait(r"^penstock +starting")
    until(lambda: "node 1 of 2" in follower.run("ps").stdout)
    assert re.search(rf"followed +running .* pid {process.pid}  node 1 of 2  ", follower.run("ps").stdout)
    follower.run("logs", "--name", "followed")
    refused = follower.run("apply", graph, check=False)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "run penstock apply on the leader's host" in line
    assert "stopped" in follower.run("down", graph).stdout
    assert process.wait(timeout=TIMEOUT_S) == 0


REFUSED = (
    ((), r"roles\.aggregated\.nodes: 2: each node of a worker runs `penstock up` of its own; start it here with --run aggregated=1 --leader"),
    (("--node-rank", "1", "--run", "aggregated"), r"--node-rank 1: nothing says where node 0 of roles\.aggregated is"),
    (("--node-rank", "2", "--run", "aggregated", "--leader", "tcp://127.0.0.1:1"), r"--node-rank 2: roles\.aggregated has nodes 2"),
    (("--node-rank", "1", "--leader", "tcp://127.0.0.1:1"), r"--node-rank 1: a node follows one worker"),
    (("--run", "aggregated=2", "--leader", "tcp://127.0.0.1:1"), r"roles\.aggregated: 2 workers over 2 nodes: a host leads one"),
    (("--set", "roles.aggregated.nodes=3"), r"roles\.aggregated: nodes: 2 devices .* are no equal parts on 3 nodes"),
    (("--set", "roles.aggregated.engine=paged"), r"roles\.aggregated: nodes: a worker of engine 'paged' is on one node"),
)  # fmt: skip


def test_what_no_node_could_run_ends_in_one_line(node, capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(node("lead"))
    for flags, line in REFUSED:
        assert main(["up", str(graph), *flags]) == 2
        (last,) = capsys.readouterr().err.strip().splitlines()
        assert re.search(line, last), last
