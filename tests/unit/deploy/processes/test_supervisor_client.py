"""What a frontend asks its supervisor for the live page, over the real control channel."""

from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.control.messages import RunningDeployment
from penstock.deploy.control.server import ControlServer
from penstock.deploy.processes.supervisor_client import SupervisorClient
from penstock.graph.graph import Slo
from penstock.planner.decision_log import LoggedRound, LoggedRun
from penstock.planner.memory_connector import MemoryConnector
from penstock.planner.observation import ObservationStream
from penstock.planner.record import DecisionRecord, SeenDeployment
from penstock.runtime.observations import RequestWindow, WorkerWindow
from tests.support.planner_world import digest


@asynccontextmanager
async def served(directory, *, kill=None, log=""):
    """Have a supervisor in the block; gives its client, and the stream of what its processes tell."""
    connector, stream = MemoryConnector({Role.AGGREGATED: 2}), ObservationStream()
    me = RunningDeployment(name="suite", url="http://127.0.0.1:1", pid=1, planner_log=str(log))
    async with ControlServer(connector, stream, directory, me, kill=kill):
        yield SupervisorClient(directory, Slo(ttft_s=0.5)), stream
    await connector.close()


async def test_it_adds_up_what_all_processes_saw(tmp_path):
    async with served(tmp_path) as (client, stream):
        for name in ("frontend-1", "frontend-2"):
            times = {"ttft_s": digest(0.2, 4), "queued": 1}
            stream.put(name, RequestWindow(seconds=1.0, arrivals=3, finished=2, **times))
        window = WorkerWindow(seconds=1.0, role=Role.AGGREGATED, generated_tokens=50, step_s=digest(0.01, 1))
        stream.put("worker-1", window)
        seen = await client.overview()
    assert (seen.name, seen.frontends, seen.queued) == ("suite", ("frontend-1", "frontend-2"), 2)
    assert seen.arrivals_per_s == pytest.approx(6.0, rel=0.1)
    assert seen.ttft.count == 8
    assert seen.ttft.p50 == pytest.approx(0.2, rel=0.06)
    assert seen.itl is seen.planner is None
    assert seen.speeds["worker-1"].generated_tokens_per_s == pytest.approx(50)
    assert seen.output_tokens_per_s == pytest.approx(50)
    assert len(seen.replicas) == 2
    assert seen.target.ttft_s == 0.5


async def test_it_reads_the_end_of_the_planners_log_again_once_it_grows(tmp_path):
    log = tmp_path / "planner.jsonl"

    def add(*entries):
        with log.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))

    def rounds(first, count):
        for number in range(first, first + count):
            record = DecisionRecord(number=number, at_s=0.0, seen=SeenDeployment(seconds=1.0))
            yield LoggedRound(time_s=float(number), record=record)

    async with served(tmp_path, log=log) as (client, _):
        assert (await client.overview()).planner == (), "not begun"
        add(LoggedRun(time_s=0.0, version="1"), *rounds(1, 2000))
        planner = (await client.overview()).planner
        assert [each.number for each in planner] == list(range(2000, 1988, -1))
        assert (planner[0].outcome, planner[0].text) == ("blind", "no change")
        add(*rounds(2001, 1))
        with log.open("ab") as file:
            file.write(b'{"torn')
        assert (await client.overview()).planner[0].number == 2001


async def test_it_kills_only_where_the_deployment_lets_it(tmp_path):
    killed = []
    async with served(tmp_path, kill=killed.append) as (client, _):
        await client.kill("worker-1")
        assert killed == ["worker-1"]
    async with served(tmp_path) as (client, _):
        with pytest.raises(RequestError, match=r"frontend\.page\.kills_workers") as caught:
            await client.kill("worker-1")
        assert caught.value.http_status == 403


async def test_without_a_supervisor_it_says_so():
    with pytest.raises(Unavailable, match="no supervisor answers"):
        await SupervisorClient(Path("/nowhere"), None).overview()
