"""The planner of a deployment of this machine, as its graph describes it."""

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR
from penstock.deploy.commands.planner.text import paragraphs
from penstock.deploy.processes.planner_metrics import PlannerMetrics
from penstock.deploy.supervisor.planning import make_planning
from penstock.graph import build
from penstock.planner.act.memory_connector import MemoryConnector
from penstock.planner.explain.entries import Round, read_entries
from penstock.planner.observe.stream import ObservationStream
from penstock.runtime.observations.windows import Digest, GpuUse, RequestWindow, WorkerWindow, bucket_of
from penstock.sim.loop.loop import run_virtual
from tests.support.coroutines import virtual

A = Role.AGGREGATED
LOG = "planner.jsonl"


def digest(value, count):
    return Digest(count=count, total=value * count, buckets={bucket_of(value): count})


def made(log_path, planner, connector, stream, *, tell=lambda _planned: None, **role):
    said = []
    graph = build(
        {"model": "demo", "roles": {"aggregated": role}, "planner": planner, "slo": {"itl_s": 0.05}}
    )
    found = make_planning(
        graph,
        graph.roles.present(),
        connector,
        stream,
        model_dir=MODEL_DIR,
        log_path=log_path,
        say=lambda *line: said.append(" ".join(line)),
        tell=tell,
    )
    return found, said


@virtual
async def test_without_planner_in_the_graph_there_is_none(tmp_path):
    found, said = made(tmp_path / LOG, None, MemoryConnector({A: 1}), ObservationStream())
    assert found is None
    assert not said


@virtual
async def test_a_data_sheet_is_warned_of_once_and_a_mock_engine_is_not(tmp_path):
    _, said = made(tmp_path / LOG, {"max_workers": 3}, MemoryConnector({A: 1}), ObservationStream())
    assert said[0].startswith("planner starting 1 to 3 aggregated for TTFT 2000 ms and ITL 50 ms of 90 %")
    assert [line for line in said if "has no profile" in line] == said[1:]
    _, said = made(
        tmp_path / LOG, {"max_workers": 3}, MemoryConnector({A: 1}), ObservationStream(), engine="mock"
    )
    assert not any("has no profile" in line for line in said)


@virtual
async def test_windows_of_processes_scale_a_deployment_and_the_change_is_said(tmp_path):
    connector, stream = MemoryConnector({A: 1}), ObservationStream()
    planner, said = made(
        tmp_path / LOG, {"max_workers": 4}, connector, stream, engine="mock", mock={"timing": {"step_s": 0.02}},
        max_running_requests=4,
    )  # fmt: skip
    window = RequestWindow(
        seconds=1.0, arrivals=6, finished=6, input_tokens=digest(100, 6), output_tokens=digest(50, 6)
    )
    with planner:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(planner.run())
            for second in range(60):
                stream.put("frontend-1", window)
                stream.put("aggregated-1", WorkerWindow(seconds=1.0, role=A, ready_s=second))
                await asyncio.sleep(1)
            task.cancel()
    assert len((await connector.scale()).replicas) == 4
    assert any(line.startswith("planner scales 3 aggregated more") for line in said), said


def test_steps_that_are_slower_than_set_add_workers(tmp_path):
    async def main(step_s):
        connector, stream = MemoryConnector({A: 1}), ObservationStream()
        planner, _ = made(
            tmp_path / LOG,
            {"max_workers": 16},
            connector,
            stream,
            engine="mock",
            mock={"timing": {"step_s": 0.01}},
        )
        window = RequestWindow(
            seconds=1.0, arrivals=60, finished=60, input_tokens=digest(100, 60), output_tokens=digest(50, 60)
        )
        worker = WorkerWindow(
            seconds=1.0, role=A, ready_s=100.0, step_s=digest(step_s, 30), running_requests=20
        )
        with planner:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(planner.run())
                for _ in range(60):
                    stream.put("frontend-1", window)
                    stream.put("aggregated-1", worker)
                    await asyncio.sleep(1)
                task.cancel()
        return len((await connector.scale()).replicas)

    assert run_virtual(main(0.04)) > run_virtual(main(0.01))


def test_a_dry_run_says_each_change_once(tmp_path):
    async def main():
        connector, stream = MemoryConnector({A: 1}), ObservationStream()
        planning, said = made(
            tmp_path / LOG, {"max_workers": 4, "act": {"dry_run": True}}, connector, stream, engine="mock", max_running_requests=4,
        )  # fmt: skip
        with planning:
            task = asyncio.create_task(planning.run())
            for second in range(120):
                count = 200 if second < 60 else 1
                window = RequestWindow(
                    seconds=1.0,
                    arrivals=count,
                    input_tokens=digest(100, count),
                    output_tokens=digest(50, count),
                )
                stream.put("frontend-1", window)
                await asyncio.sleep(1)
            task.cancel()
        assert len((await connector.scale()).replicas) == 1
        return [line for line in said if line.startswith("planner would")]

    lines = run_virtual(main())
    assert [line.count("3 aggregated more") for line in lines] == [1], lines


def test_the_power_of_gpus_and_a_rehearsal_are_told(tmp_path):
    """What workers draw goes from their windows to the frontend's metrics, and to `penstock planner why`."""
    told, registry = [], CollectorRegistry()

    async def main():
        connector, stream = MemoryConnector({A: 2}), ObservationStream()
        planning, _ = made(
            tmp_path / LOG, {"rehearse_s": 20, "cool_down_s": 40}, connector, stream, engine="mock", tell=told.append,
        )  # fmt: skip
        use = GpuUse(watts=512.0, limit_watts=700.0, utilization=0.8)
        window = RequestWindow(
            seconds=1.0, arrivals=2, finished=2, input_tokens=digest(100, 2), output_tokens=digest(50, 2)
        )
        with planning:
            task = asyncio.create_task(planning.run())
            for second in range(90):
                stream.put("frontend-1", window)
                stream.put("aggregated-1", WorkerWindow(seconds=1.0, role=A, ready_s=60.0 + second, gpu=use))
                await asyncio.sleep(1)
            task.cancel()
        assert len((await connector.scale()).replicas) == 1

    run_virtual(main())
    metrics = PlannerMetrics(registry)
    for planned in told:
        metrics.take(planned)
    assert registry.get_sample_value("penstock_planner_gpu_watts", {"role": "aggregated"}) == 512.0
    assert registry.get_sample_value(
        "penstock_planner_gpu_utilization", {"role": "aggregated"}
    ) == pytest.approx(0.8)
    rounds = [entry for entry in read_entries(tmp_path / LOG) if isinstance(entry, Round)]
    change = next(entry for entry in rounds if entry.record.retires)
    text = "\n".join(paragraphs(change))
    assert "GPUs at 512 W and 80%" in text
    assert re.search(r"simulated +\d+ requests over \d+ s on 1 aggregated: 0 late, TTFT", text), text
