"""The planner of a deployment of this machine, as its graph describes it."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from penstock.cli.planner import paragraphs
from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR
from penstock.deploy.processes.frontend_process import PlannerMetrics
from penstock.deploy.supervisor.planning import make_planning
from penstock.graph import build
from penstock.planner.decision_log import LoggedRound, read_entries
from penstock.planner.memory_connector import MemoryConnector
from penstock.planner.observation import ObservationStream
from penstock.runtime.observations import GpuUse, RequestWindow, WorkerWindow
from tests.support.planner_world import digest

A = Role.AGGREGATED


class Planned:
    """A deployment in memory, and the planner of its graph."""

    def __init__(self, log_path, planner, *, workers=1, **role):
        graph = build(
            {"model": "demo", "roles": {"aggregated": role}, "planner": planner, "slo": {"itl_s": 0.05}}
        )
        self.said, self.told, self.stream = [], [], ObservationStream()
        self.connector = MemoryConnector({A: workers})
        self.planning = make_planning(
            graph,
            graph.roles.present(),
            self.connector,
            self.stream,
            model_dir=MODEL_DIR,
            log_path=log_path,
            say=lambda *line: self.said.append(" ".join(line)),
            tell=self.told.append,
        )

    async def run(self, seconds, requests, worker):
        """Plan while a frontend and a worker tell of each second; returns how many workers there are then.

        Args:
            requests: gives how many arrive in a second.
            worker: gives a worker's window, or None.
        """
        with self.planning:
            task = asyncio.create_task(self.planning.run())
            for second in range(seconds):
                count = requests(second)
                lengths = {"input_tokens": digest(100, count), "output_tokens": digest(50, count)}
                window = RequestWindow(seconds=1.0, arrivals=count, finished=count, **lengths)
                self.stream.put("frontend-1", window)
                if worker is not None:
                    self.stream.put("aggregated-1", worker)
                await asyncio.sleep(1)
            task.cancel()
        return len((await self.connector.scale()).replicas)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "planner.jsonl"


@pytest.mark.virtual
async def test_without_planner_in_the_graph_there_is_none(log):
    planned = Planned(log, None)
    assert planned.planning is None
    assert not planned.said


@pytest.mark.virtual
async def test_a_data_sheet_is_warned_of_once_and_a_mock_engine_is_not(log):
    said = Planned(log, {"max_workers": 3}).said
    assert said[0].startswith("planner starting 1 to 3 aggregated for TTFT 2000 ms and ITL 50 ms of 90 %")
    assert [line for line in said if "has no profile" in line] == said[1:]
    said = Planned(log, {"max_workers": 3}, engine="mock").said
    assert not any("has no profile" in line for line in said)


@pytest.mark.virtual
async def test_steps_that_are_slower_than_set_add_workers(log):
    counts = []
    for step_s in (0.01, 0.04):
        planned = Planned(log, {"max_workers": 16}, engine="mock", mock={"timing": {"step_s": 0.01}})
        steps = digest(step_s, 30)
        worker = WorkerWindow(seconds=1.0, role=A, ready_s=100.0, step_s=steps, running_requests=20)
        counts.append(await planned.run(60, lambda _: 60, worker))
    assert counts[0] < counts[1]


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.virtual
async def test_each_change_or_what_a_dry_run_would_change_is_said_once(log, dry_run):
    settings = {"max_workers": 4, "act": {"dry_run": dry_run}}
    planned = Planned(log, settings, engine="mock", max_running_requests=4)
    workers = await planned.run(90, lambda second: 200 if second < 60 else 1, None)
    verb = "would" if dry_run else "scales"
    lines = [line for line in planned.said if line.startswith(f"planner {verb}")]
    assert [line.count("3 aggregated more") for line in lines] == [1], planned.said
    assert workers == (1 if dry_run else 4)


@pytest.mark.virtual
async def test_the_power_of_gpus_is_told(log):
    """What workers draw goes from their windows to the frontend's metrics, and to `penstock planner why`."""
    registry = CollectorRegistry()
    planned = Planned(log, {"cool_down_s": 40}, workers=2, engine="mock")
    use = GpuUse(watts=512.0, utilization=0.8)
    worker = WorkerWindow(seconds=1.0, role=A, ready_s=60.0, gpu=use)
    assert await planned.run(90, lambda _: 2, worker) == 1
    metrics = PlannerMetrics(registry)
    for told in planned.told:
        metrics.take(told)
    role = {"role": "aggregated"}
    assert registry.get_sample_value("penstock_planner_gpu_watts", role) == 512.0
    assert registry.get_sample_value("penstock_planner_gpu_utilization", role) == pytest.approx(0.8)
    rounds = [entry for entry in read_entries(log) if isinstance(entry, LoggedRound)]
    text = "\n".join(paragraphs(next(entry for entry in rounds if entry.record.retires)))
    assert "GPUs at 512 W and 80%" in text
