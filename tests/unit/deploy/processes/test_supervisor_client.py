"""What a frontend asks its supervisor for the live page, over the real control channel."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.control.messages import Deployment
from penstock.deploy.control.server import ControlServer
from penstock.deploy.processes.supervisor_client import SupervisorClient
from penstock.graph.slo import Slo
from penstock.planner.act.memory_connector import MemoryConnector
from penstock.planner.explain.entries import Round, Run
from penstock.planner.explain.record import DecisionRecord, Seen
from penstock.planner.observe.stream import ObservationStream
from penstock.runtime.observations.windows import Digest, RequestWindow, WorkerWindow, bucket_of


def served(scene, tmp_path, *, kill=None, log=""):
    async def main():
        connector, stream = MemoryConnector({Role.AGGREGATED: 2}), ObservationStream()
        me = Deployment(name="suite", url="http://127.0.0.1:1", pid=1, planner_log=log)
        async with ControlServer(connector, stream, tmp_path, me, kill=kill):
            await scene(SupervisorClient(tmp_path, Slo(ttft_s=0.5)), stream)
        await connector.close()

    asyncio.run(main())


def digest(value, count=1):
    return Digest(count=count, total=value * count, buckets={bucket_of(value): count})


def test_it_adds_up_what_all_processes_saw(tmp_path):
    async def scene(client, stream):
        for name in ("frontend-1", "frontend-2"):
            stream.put(
                name, RequestWindow(seconds=1.0, arrivals=3, finished=2, ttft_s=digest(0.2, 4), queued=1)
            )
        stream.put(
            "worker-1",
            WorkerWindow(seconds=1.0, role=Role.AGGREGATED, generated_tokens=50, step_s=digest(0.01)),
        )
        seen = await client.overview()
        assert (seen.name, seen.frontends, seen.queued) == ("suite", ("frontend-1", "frontend-2"), 2)
        assert seen.arrivals_per_s == pytest.approx(6.0, rel=0.1)
        assert seen.ttft.count == 8
        assert seen.ttft.p50 == pytest.approx(0.2, rel=0.06)
        assert seen.itl is None
        assert seen.speeds["worker-1"].generated_tokens_per_s == pytest.approx(50)
        assert seen.output_tokens_per_s == pytest.approx(50)
        assert len(seen.replicas) == 2
        assert seen.target.ttft_s == 0.5
        assert seen.planner is None

    served(scene, tmp_path)


def test_it_reads_the_end_of_the_planners_log_again_once_it_grows(tmp_path):
    log = tmp_path / "planner.jsonl"

    def add(*entries):
        with log.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))

    def rounds(first, count):
        return [
            Round(time_s=float(n), record=DecisionRecord(number=n, at_s=0.0, seen=Seen(seconds=1.0)))
            for n in range(first, first + count)
        ]

    async def scene(client, _stream):
        assert (await client.overview()).planner == (), "not begun"
        add(Run(time_s=0.0, version="1"), *rounds(1, 2000))
        seen = await client.overview()
        assert [each.number for each in seen.planner] == list(range(2000, 1988, -1))
        assert (seen.planner[0].outcome, seen.planner[0].text) == ("blind", "no change")
        add(*rounds(2001, 1))
        with log.open("ab") as file:
            file.write(b'{"torn')
        assert (await client.overview()).planner[0].number == 2001

    served(scene, tmp_path, log=str(log))


def test_it_kills_only_where_the_deployment_lets_it(tmp_path):
    killed = []

    async def lets(client, _stream):
        await client.kill("worker-1")
        assert killed == ["worker-1"]

    async def does_not(client, _stream):
        with pytest.raises(RequestError, match=r"frontend\.page\.kills_workers") as caught:
            await client.kill("worker-1")
        assert caught.value.http_status == 403

    served(lets, tmp_path, kill=killed.append)
    served(does_not, tmp_path)


async def test_without_a_supervisor_it_says_so():
    with pytest.raises(Unavailable, match="no supervisor answers"):
        await SupervisorClient(Path("/nowhere"), None).overview()
