"""Runs of the experiments: what the cache keeps, what the runner runs, what a workload is, what a run's figures are."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.policies.cells import TROUBLES
from benchmarks.runner import SYNTHETIC, Cache, Description, Run, Trouble, Workload, find_graph, workload
from benchmarks.runner.figures import served_share
from benchmarks.runner.workload import reusable_share
from penstock.core.errors import ConfigError

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
