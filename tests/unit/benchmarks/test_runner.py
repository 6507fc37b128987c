"""Runs of the experiments: what the cache keeps, what the runner runs, what a workload is, what a run's figures are."""

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policies.cells import TROUBLES
from benchmarks.runner import (
    RECORDED,
    SYNTHETIC,
    Cache,
    Description,
    Run,
    Runner,
    Trouble,
    Workload,
    find_graph,
    workload,
)
from benchmarks.runner import runner as runner_module
from benchmarks.runner.figures import served_share
from benchmarks.runner.workload import reusable_share
from penstock.core.errors import ConfigError, PenstockError
from penstock.sim.workload.prompt import Prompt, named_units
from penstock.sim.workload.workload import Session, Turn

ROOT = Path(__file__).parents[3]


class TestCache:
    def test_a_line_that_was_cut_off_is_run_again(self, tmp_path):
        path = tmp_path / "state.jsonl"
        Cache(path).put("a", {"x": 1.0})
        with path.open("ab") as file:
            file.write(b'{"key": "b", "figu')
        torn = Cache(path)
        assert torn.get("b") is None
        torn.put("b", {"x": 2.0})
        assert Cache(path).get("a") == {"x": 1.0}
        assert Cache(path).get("b") == {"x": 2.0}

    def test_another_file_is_refused_and_left_alone(self, tmp_path):
        path = tmp_path / "notes.txt"
        path.write_text('{"key": "a", "figures": {}}\nhello\n')
        with pytest.raises(ConfigError, match=r"notes.txt, line 2: not a result"):
            Cache(path)
        assert path.read_text().endswith("hello\n")
        with pytest.raises(ConfigError, match="cannot be used"):
            Cache(tmp_path)
        with pytest.raises(ConfigError, match=r"state.jsonl: cannot be used: No such file or directory"):
            Cache(tmp_path / "nowhere" / "state.jsonl")


@dataclass(frozen=True)
class Doubled:
    """A job that doubles a number; some fail."""

    number: int
    error: type[Exception] | None = None

    @property
    def key(self):
        return f"doubled {self.number}"

    def __call__(self):
        if self.error is not None:
            raise self.error("no")
        return {"doubled": 2.0 * self.number}


class Inline:
    """Processes that run each job at once, in this process."""

    def __init__(self, jobs):
        self.jobs = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, job):
        self.jobs.append(job)
        future = Future()
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001
            future.set_exception(error)
        return future


class TestRunner:
    @pytest.fixture(autouse=True)
    def inline(self, monkeypatch):
        monkeypatch.setattr(runner_module, "Processes", Inline)

    def test_each_job_runs_once(self, tmp_path):
        jobs = [Doubled(number) for number in range(4)]
        with Runner(2, Cache(tmp_path / "state.jsonl")) as runner:
            assert runner.run(jobs[1]) == {"doubled": 2.0}
            assert [runner.knows(job) for job in jobs] == [False, True, False, False]
            assert dict(runner.run_many(jobs)) == {job: {"doubled": 2.0 * job.number} for job in jobs}
        assert runner._processes.jobs == [jobs[1], jobs[0], jobs[2], jobs[3]]
        with Runner(2, Cache(tmp_path / "state.jsonl")) as again:
            assert len(dict(again.run_many(jobs))) == 4
        assert again._processes.jobs == []

    def test_a_failure_keeps_what_was_done_before(self, tmp_path):
        cache = Cache(tmp_path / "state.jsonl")
        with Runner(2, cache) as runner:
            runner.run(Doubled(1))
            with pytest.raises(ConfigError, match="no"):
                list(runner.run_many([Doubled(1), Doubled(2, ConfigError)]))
            with pytest.raises(PenstockError, match="try fewer --jobs, and the same --state"):
                runner.run(Doubled(3, BrokenProcessPool))
        assert len(cache) == 1


@pytest.mark.slow
def test_a_job_runs_in_a_process():
    job = Description(find_graph(ROOT / "examples", "8b-bf16"), Workload(SYNTHETIC, 50))
    with Runner(1) as runner:
        assert runner.run(job) == job()


class TestServedShare:
    @pytest.mark.parametrize(("rate", "share"), [(8.0, 1.0), (10.0, 1.0), (12.5, 0.8)])
    def test_a_queue_that_serves_ten_a_second_completes_at_most_as_many(self, rate, share):
        """Beyond its rate a toy queue serves its rate over that of arrivals, however long it runs."""
        for requests in (2_000, 20_000):
            sent = np.arange(requests) / rate
            begun = np.empty(requests)
            free = 0.0
            for number, at in enumerate(sent):
                begun[number] = max(free, at)
                free = begun[number] + 0.1
            assert served_share(sent, begun, sent[-1]) == pytest.approx(share, abs=0.002)

    def test_only_the_middle_of_the_second_half_counts(self):
        sent = np.array([5.0, 50.0, 60.0, 70.0, 93.0, 96.0])
        assert served_share(sent, sent + 1.0, 100.0) == 1.0  # 61, 71, 94 of 60, 70, 93
        assert served_share(sent, sent + 22.0, 100.0) == 1.0  # 72, 82, 92
        assert served_share(sent, sent + 30.0, 100.0) == pytest.approx(2 / 3)  # 80, 90
        assert served_share(np.array([5.0]), np.array([6.0]), 100.0) == 0.0


class TestWorkload:
    def test_the_synthetic_one_is_as_published(self):
        for seed in (1, 2):
            sessions = Workload(SYNTHETIC, 8_000).sessions(25.0, seed)
            prompt_tokens, output_tokens = workload.mean_tokens(sessions)
            assert sum(len(session.turns) for session in sessions) == 8_000
            assert prompt_tokens == pytest.approx(4_000, rel=0.03)
            assert output_tokens == pytest.approx(800, rel=0.02)
            assert sessions[-1].at_s == pytest.approx(8_000 / 25.0, rel=0.05)
            assert 0.55 < reusable_share(sessions, 64) < 0.70

    def test_a_part_of_the_trace_has_a_name_and_requests_of_its_own(self, tmp_path):
        trace = tmp_path / "trace.jsonl"
        row = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [0, 1]}\n'
        trace.write_text("".join(row % (300 * number, 600 + number) for number in range(9)))
        graph = find_graph(ROOT / "examples", "8b-bf16")
        whole, part, last = (Workload(RECORDED, 4, trace, skip) for skip in (0, 4, 8))
        lengths = [[one.turns[0].input_tokens for one in each.sessions(8.0)] for each in (whole, part, last)]
        assert lengths == [[600, 601, 602, 603], [604, 605, 606, 607], [608]]
        times = [[one.at_s for one in each.sessions(8.0)] for each in (whole, part)]
        assert times[0] == pytest.approx(times[1]), "a part begins at once, at the rate of all"
        assert Run(graph, whole, 8.0).key != Run(graph, part, 8.0).key
        with pytest.raises(ConfigError, match="has no more than 9 requests"):
            Workload(RECORDED, 4, trace, 9).sessions(8.0)

    def test_what_could_be_reused_is_counted_by_hand(self):
        shared = named_units(1, 4)  # 64 tokens
        first = Session(0.0, (Turn(96, 40), Turn(160, 16)), Prompt(1, shared))
        second = Session(1.0, (Turn(80, 10),), Prompt(2, shared))
        # Blocks of 32. Of 96: nothing. Of 160: the 128 of 96 + 40 that are whole blocks. Of 80: the 64 shared.
        assert reusable_share([first, second], 32) == (0 + 128 + 64) / (96 + 160 + 80)
        # A prompt that is there to its last token is computed from its last block on.
        whole = Session(2.0, (Turn(64, 1),), Prompt(3, shared))
        assert reusable_share([first, whole], 32) == (0 + 128 + 32) / (96 + 160 + 64)


def test_the_figures_of_a_run_add_up():
    graph, asked = find_graph(ROOT / "examples", "8b-bf16"), Workload(SYNTHETIC, 60)
    calm, slow = (
        Run(graph, asked, 20.0, "round-robin", trouble=trouble)()
        for trouble in (Trouble(), TROUBLES["slow-worker"])
    )
    assert calm["requests"] == 60
    assert calm["failed"] == 0
    assert 0 < calm["ttft_mean_s"] < slow["ttft_mean_s"] < slow["e2e_mean_s"]
    assert slow["worker_share_min"] <= 1 <= slow["worker_share_max"]
    late, in_time = (
        Run(graph, asked, 20.0, "least-loaded", trouble=trouble)()
        for trouble in (TROUBLES["late-loads"], Trouble())
    )
    assert late["ttft_mean_s"] != in_time["ttft_mean_s"]
    assert Description(graph, asked)()["guess_rps"] > 1
