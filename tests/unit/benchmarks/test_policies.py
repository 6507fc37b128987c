"""`python -m benchmarks policies`: what is resumed, what is searched, what the ratios are, and what a workload is."""

import argparse
import asyncio
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from benchmarks.policies import cells, command, game, summary, workload
from benchmarks.policies.arena import Arena, Files, Results
from benchmarks.policies.cells import Cell, Effort, read_rates
from benchmarks.policies.ledger import Ledger
from benchmarks.policies.plot import draw
from benchmarks.policies.saturation import find_saturation
from benchmarks.policies.workload import RECORDED, SYNTHETIC, Workload, reusable_share
from penstock.core.errors import ConfigError, PenstockError
from penstock.sim.workload.prompt import Prompt, named_units
from penstock.sim.workload.workload import Session, Turn

ROOT = Path(__file__).parents[3]


class TestLedger:
    def test_what_was_put_is_there_after_a_restart(self, tmp_path):
        path = tmp_path / "state.jsonl"
        first = Ledger(path)
        first.put("a", {"x": 1.5})
        first.put("b", {"x": 2.0})
        again = Ledger(path)
        assert (len(again), again.get("a"), again.get("b"), again.get("c")) == (
            2,
            {"x": 1.5},
            {"x": 2.0},
            None,
        )

    def test_a_line_that_was_cut_off_is_played_again(self, tmp_path):
        path = tmp_path / "state.jsonl"
        Ledger(path).put("a", {"x": 1.0})
        with path.open("ab") as file:
            file.write(b'{"key": "b", "figu')
        torn = Ledger(path)
        assert torn.get("b") is None
        torn.put("b", {"x": 2.0})
        assert Ledger(path).get("a") == {"x": 1.0}
        assert Ledger(path).get("b") == {"x": 2.0}

    def test_another_file_is_refused_and_left_alone(self, tmp_path):
        path = tmp_path / "notes.txt"
        path.write_text('{"key": "a", "figures": {}}\nhello\n')
        with pytest.raises(ConfigError, match=r"notes.txt, line 2: not a result"):
            Ledger(path)
        assert path.read_text().endswith("hello\n")
        with pytest.raises(ConfigError, match="cannot be used"):
            Ledger(tmp_path)
        with pytest.raises(ConfigError, match=r"state.jsonl: cannot be used: No such file or directory"):
            Ledger(tmp_path / "nowhere" / "state.jsonl")

    def test_forgetting_is_for_good(self, tmp_path):
        path = tmp_path / "state.jsonl"
        ledger = Ledger(path)
        for key in ("policy=kv 1", "policy=product 1"):
            ledger.put(key, {})
        assert len(ledger.forget(lambda key: "kv" in key)) == 1
        assert Ledger(path).get("policy=kv 1") is None
        assert Ledger(path).get("policy=product 1") == {}
        assert list(tmp_path.iterdir()) == [path]


class TestSaturation:
    def search(self, limit, guess, tolerance=0.03):
        tried = []

        async def is_sustained(rate):
            tried.append(rate)
            return rate <= limit

        return asyncio.run(find_saturation(is_sustained, guess, tolerance=tolerance)), tried

    @pytest.mark.parametrize("guess", [0.5, 9.0, 10.0, 11.0, 300.0])
    def test_it_is_found_from_any_guess(self, guess):
        found, tried = self.search(10.0, guess)
        assert 10.0 / 1.03 <= found <= 10.0
        assert len(set(tried)) == len(tried) < 25

    @pytest.mark.parametrize(("limit", "message"), [(0.0, "no rate down to"), (math.inf, "every rate up to")])
    def test_a_search_without_end_is_an_error(self, limit, message):
        with pytest.raises(ConfigError, match=message):
            self.search(limit, 1.0)

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
            assert game.served_share(sent, begun, sent[-1]) == pytest.approx(share, abs=0.002)

    def test_only_the_middle_of_the_second_half_counts(self):
        sent = np.array([5.0, 50.0, 60.0, 70.0, 93.0, 96.0])
        assert game.served_share(sent, sent + 1.0, 100.0) == 1.0  # 61, 71, 94 of 60, 70, 93
        assert game.served_share(sent, sent + 22.0, 100.0) == 1.0  # 72, 82, 92
        assert game.served_share(sent, sent + 30.0, 100.0) == pytest.approx(2 / 3)  # 80, 90
        assert game.served_share(np.array([5.0]), np.array([6.0]), 100.0) == 0.0


HEAD = Cell("S", "70b-fp8", 80)
LOW, OVER, SLOW = Cell("S", "8b-bf16", 30), Cell("S", "8b-bf16", 110), Cell("S", "70b-fp8", 80, "slow-worker")
POOR = Cell("M", "8b-bf16", 30)


def results(rows, reusable=None):
    """Give results of rows (cell, policy, mean TTFT of each seed)."""
    made = Results()
    for cell, policy, seconds in rows:
        key = (cell.workload, cell.deployment)
        made.workloads[key] = {"reusable_share": (reusable or {}).get(cell.workload, 0.6)}
        made.saturation_rps[key] = 10.0
        for seed, ttft_s in enumerate(seconds, start=1):
            made.runs[cell, policy, seed] = {
                "ttft_mean_s": ttft_s,
                "e2e_mean_s": 10 * ttft_s,
                "failed": 0,
                "worker_share_min": 0.5,
                "worker_share_max": 1.5,
            }
    return made


class TestSummary:
    def figures(self, rows, **options):
        return summary.summarise(results(rows, **options), "kv").figures

    def test_seeds_are_averaged_before_ratios(self):
        rows = [
            (HEAD, "kv", [1.0, 3.0]),
            (HEAD, "round-robin", [4.0, 8.0]),
            (HEAD, "least-loaded", [2.0, 4.0]),
        ]
        found = self.figures(rows)
        assert found["headline_ttft_round-robin_over_kv"] == 3.0
        assert found["headline_e2e_round-robin_over_kv"] == 3.0
        assert found["headline_ttft_least-loaded_over_kv"] == 1.5

    def test_the_best_single_baseline_has_the_lowest_geometric_mean(self):
        rows = [
            (HEAD, "kv", [1.0]), (HEAD, "a", [1.0]), (HEAD, "b", [3.0]),
            (LOW, "kv", [2.0]), (LOW, "a", [9.0]), (LOW, "b", [2.5]),
            (OVER, "kv", [100.0]), (OVER, "a", [1.0]), (OVER, "b", [50.0]),
            (SLOW, "kv", [100.0]), (SLOW, "a", [1.0]), (SLOW, "b", [1.0]),
        ]  # fmt: skip
        told = summary.summarise(results(rows), "kv")
        assert told.best_single == "b"  # sqrt(3 * 2.5) < sqrt(1 * 9), overload and trouble left out
        assert told.figures["ttft_geomean_over_best_single"] == pytest.approx(math.sqrt(1 / 3 * 2 / 2.5))

    def test_cells_without_anything_to_reuse_count_only_against_their_own_best(self):
        rows = [
            (HEAD, "kv", [1.0]), (HEAD, "a", [2.0]),
            (POOR, "kv", [5.0]), (POOR, "a", [4.0]),
        ]  # fmt: skip
        found = self.figures(rows, reusable={"M": 0.07})
        assert found["ttft_geomean_over_best_single"] == 0.5
        assert found["cells_near_best_share"] == 0.5
        assert found["ttft_over_best_of_cell_worst"] == 1.25

    def test_within_three_per_cent_of_the_best_is_near(self):
        rows = [
            (HEAD, "kv", [1.03]), (HEAD, "a", [1.0]), (HEAD, "b", [2.0]),
            (LOW, "kv", [1.04]), (LOW, "a", [3.0]), (LOW, "b", [1.0]),
            (OVER, "kv", [1.5]), (OVER, "a", [1.2]), (OVER, "b", [9.0]),
        ]  # fmt: skip
        found = self.figures(rows)
        assert found["cells_near_best_share"] == 0.5
        assert found["ttft_over_best_of_cell_worst"] == pytest.approx(1.04)
        assert found["overload_ttft_over_best_worst"] == pytest.approx(1.25)

    def test_trouble_is_held_against_the_same_cell_without(self):
        rows = [(HEAD, "kv", [2.0]), (HEAD, "a", [1.0]), (SLOW, "kv", [2.2]), (SLOW, "a", [1.1])]
        found = self.figures(rows)
        assert found["slow-worker_ttft_over_calm_worst"] == pytest.approx(1.1)
        assert found["slow-worker_ttft_over_best_worst"] == pytest.approx(2.0)
        assert (found["slow-worker_worker_share_min"], found["slow-worker_worker_share_max"]) == (0.5, 1.5)

    def test_trouble_counts_where_nobody_else_was_played(self):
        found = self.figures([(HEAD, "kv", [2.0]), (SLOW, "kv", [2.2])])
        assert found["slow-worker_ttft_over_calm_worst"] == pytest.approx(1.1)
        assert (found["slow-worker_worker_share_min"], found["slow-worker_worker_share_max"]) == (0.5, 1.5)
        assert "slow-worker_ttft_over_best_worst" not in found

    def test_baselines_alone_make_no_claims(self):
        found = self.figures([(HEAD, "a", [1.0]), (HEAD, "b", [2.0])])
        assert set(found) == {"saturation_rps S/70b-fp8", "reusable_share S/70b-fp8", "failed_requests"}

    def test_the_plot_has_a_line_for_each_policy(self):
        rows = [(cell, policy, [1.0]) for cell in (HEAD, LOW, OVER, SLOW) for policy in ("kv", "a<b")]
        root = ET.fromstring(draw(summary.summarise(results(rows), "kv").means))
        lines = root.findall("{http://www.w3.org/2000/svg}polyline")
        assert len(lines) == 4  # two panels
        assert {line[0].text for line in lines} == {"kv", "a<b"}


class TestCells:
    def test_patterns_choose(self):
        every = list(cells.all_cells(with_recorded=True))
        assert len(every) == len(set(every)) == 2 * 4 * (5 + 3)
        assert [c.name for c in cells.select(every, ["S/*/80", "M/8b-bf16/80/slow*"])] == [
            "S/70b-fp8/80", "S/8b-bf16/80", "S/70b-fp8-host/80", "S/8b-bf16-host/80", "M/8b-bf16/80/slow-worker",
        ]  # fmt: skip
        assert cells.select(every, []) == every
        assert sum(c.is_headline for c in every) == 1
        with pytest.raises(ConfigError, match=r"'S/\*/85' matches none of"):
            cells.select(every, ["S/*/85"])

    def test_the_recorded_workload_needs_its_trace(self):
        assert {c.workload for c in cells.all_cells(with_recorded=False)} == {SYNTHETIC}
        with pytest.raises(ConfigError, match="--trace"):
            Workload(RECORDED, 10).sessions(1.0)

    def test_every_deployment_has_its_graph(self):
        files = Files(ROOT / "examples", ROOT / "benchmarks", None)
        for name in cells.DEPLOYMENTS:
            deployment = files.place(name).deployment()
            assert deployment.role_groups[0].spec.replicas == 8


class TestWorkload:
    def test_the_synthetic_one_is_as_published(self):
        for seed in (1, 2):
            sessions = Workload(SYNTHETIC, 8_000, seed).sessions(25.0)
            prompt_tokens, output_tokens = workload.mean_tokens(sessions)
            assert sum(len(session.turns) for session in sessions) == 8_000
            assert prompt_tokens == pytest.approx(4_000, rel=0.03)
            assert output_tokens == pytest.approx(800, rel=0.02)
            assert sessions[-1].at_s == pytest.approx(8_000 / 25.0, rel=0.05)
            assert 0.55 < reusable_share(sessions, 64) < 0.70

    def test_seeds_differ_and_rates_only_stretch(self):
        one, same, fast, other = (
            Workload(SYNTHETIC, 200, seed).sessions(rate)
            for seed, rate in ((1, 5.0), (1, 5.0), (1, 10.0), (2, 5.0))
        )
        assert [s.turns for s in one] == [s.turns for s in same] == [s.turns for s in fast]
        assert [s.at_s for s in one] == pytest.approx([2 * s.at_s for s in fast])
        assert [s.turns for s in one] != [s.turns for s in other]

    def test_the_recorded_one_is_played_at_the_rate(self, tmp_path):
        trace = tmp_path / "trace.jsonl"
        row = '{"timestamp": %d, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
        trace.write_text("".join(row % (300 * number) for number in range(9)))
        sessions = Workload(RECORDED, 6, trace=trace).sessions(8.0)
        assert len(sessions) == 6
        assert {len(session.turns) for session in sessions} == {1}
        assert sessions[-1].at_s == pytest.approx(6 / 8.0)

    def test_what_could_be_reused_is_counted_by_hand(self):
        shared = named_units(1, 4)  # 64 tokens
        first = Session(0.0, (Turn(96, 40), Turn(160, 16)), Prompt(1, shared))
        second = Session(1.0, (Turn(80, 10),), Prompt(2, shared))
        # Blocks of 32. Of 96: nothing. Of 160: the 128 of 96 + 40 that are whole blocks. Of 80: the 64 shared.
        assert reusable_share([first, second], 32) == (0 + 128 + 64) / (96 + 160 + 80)
        # A prompt that is there to its last token is computed from its last block on.
        whole = Session(2.0, (Turn(64, 1),), Prompt(3, shared))
        assert reusable_share([first, whole], 32) == (0 + 128 + 32) / (96 + 160 + 64)


class TestArena:
    """The harness itself, with games that are only noted."""

    EFFORT = Effort(requests=50, headline_requests=60, seeds=2, headline_seeds=3, tolerance=0.1)

    @pytest.fixture
    def play(self, tmp_path, monkeypatch):
        files = Files(tmp_path / "examples", ROOT / "benchmarks", None)
        for name in cells.DEPLOYMENTS:
            place = files.place(name)
            for path in (place.graph, place.profile):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(path.name)
        games = []

        def run(chosen, policies=("kv", "good", "bad"), fail_after=None, state="state.jsonl"):
            games.clear()
            arena = Arena(
                files,
                Ledger(tmp_path / state),
                {name: name for name in policies},
                jobs=1,
            )

            async def once(key, function, *arguments):
                known = arena._ledger.get(key)
                if known is None:
                    if fail_after is not None and len(games) >= fail_after:
                        raise PenstockError("interrupted")
                    games.append(key)
                    known = self.answer(function, *arguments)
                    arena._ledger.put(key, known)
                return known

            monkeypatch.setattr(arena, "_once", once)

            async def compare():
                async with arena:
                    return await arena.compare(chosen, self.EFFORT)

            return asyncio.run(compare()), list(games)

        return run

    @staticmethod
    def answer(function, *arguments):
        if function is game.describe:
            return {"reusable_share": 0.6, "guess_rps": 3.0}
        (one,) = arguments
        limit = {"kv": 8.0, "good": 10.0, "bad": 5.0}[one.policy]
        return {"served_share": min(limit / one.rate_per_s, 1.0), "ttft_mean_s": one.rate_per_s}

    def test_saturation_is_the_best_policys_and_cells_are_parts_of_it(self, play):
        found, _ = play([LOW, HEAD])
        for key in (("S", "8b-bf16"), ("S", "70b-fp8")):
            assert 10.0 / 0.98 / 1.1 <= found.saturation_rps[key] <= 10.0 / 0.98
        rate = found.saturation_rps["S", "8b-bf16"]
        assert found.runs[LOW, "bad", 1]["ttft_mean_s"] == pytest.approx(0.3 * rate)
        assert len(found.runs) == 3 * (2 + 3)  # the headline cell has its own number of seeds

    def test_a_saturation_that_is_given_is_not_searched(self, play, monkeypatch):
        monkeypatch.setattr(self, "EFFORT", replace(self.EFFORT, saturation_rps={"S/8b-bf16": 4.0}))
        found, games = play([LOW])
        assert found.saturation_rps == {("S", "8b-bf16"): 4.0}
        assert found.runs[LOW, "bad", 1]["ttft_mean_s"] == pytest.approx(1.2)
        assert len(games) == 1 + 3 * 2

    @pytest.mark.parametrize("text", ["S/8b-bf16", "S/8b-bf16=", "S/8b-bf16=-1", "S/9b=3", "S/8b-bf16=nan"])
    def test_a_saturation_that_is_none_is_refused(self, text):
        assert read_rates("S/8b-bf16=31.9,M/70b-fp8=4") == {"S/8b-bf16": 31.9, "M/70b-fp8": 4.0}
        with pytest.raises(ConfigError, match="expected NAME=RATE"):
            read_rates(text)

    def test_a_second_run_plays_nothing_and_comes_to_the_same(self, play):
        first, played = play([LOW])
        again, replayed = play([LOW])
        assert played
        assert not replayed
        assert again == first

    @pytest.mark.parametrize("after", [0, 1, 5, 14])
    def test_after_an_interruption_only_the_rest_is_played(self, play, after):
        """Of the search as well as of the cells."""
        whole, games = play([LOW], state="whole.jsonl")
        with pytest.raises(PenstockError, match="interrupted"):
            play([LOW], fail_after=after)
        found, rest = play([LOW])
        assert len(rest) == len(games) - after
        assert found == whole

    def test_another_profile_is_another_game(self, play, tmp_path):
        play([LOW])
        game.fingerprint.cache_clear()
        Files(tmp_path / "examples", tmp_path, None).place("8b-bf16").profile.write_text("changed")
        _, games = play([LOW])
        game.fingerprint.cache_clear()
        assert games


def test_a_game_is_played_and_its_figures_add_up():
    place = Files(ROOT / "examples", ROOT / "benchmarks", None).place("8b-bf16")
    played = Workload(SYNTHETIC, 60)
    calm, slow = (
        game.play(game.Game(place, played, 20.0, "round-robin", trouble))
        for trouble in (cells.Trouble(), cells.TROUBLES["slow-worker"])
    )
    assert calm["requests"] == 60
    assert calm["failed"] == 0
    assert 0 < calm["ttft_mean_s"] < slow["ttft_mean_s"] < slow["e2e_mean_s"]
    assert slow["worker_share_min"] <= 1 <= slow["worker_share_max"]
    late, in_time = (
        game.play(game.Game(place, played, 20.0, "least-loaded", trouble))
        for trouble in (cells.TROUBLES["late-loads"], cells.Trouble())
    )
    assert late["ttft_mean_s"] != in_time["ttft_mean_s"]
    assert game.describe(place, played)["guess_rps"] > 1


def test_a_policy_that_is_kv_without_sessions_is_no_baseline_unless_asked_for(monkeypatch):
    options = argparse.Namespace(baselines=ROOT / "benchmarks", policies=None, ablations=False)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    played = command._policies(options)
    assert "session" not in played
    assert {"kv", "round-robin", "product", "weighted-scores"} <= set(played)
    options.policies = "kv,session"
    assert set(command._policies(options)) == {"kv", "session"}


def test_ablations_are_played_only_when_asked_for(monkeypatch):
    options = argparse.Namespace(baselines=ROOT / "benchmarks", policies=None, ablations=False)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert not any("without" in name for name in command._policies(options))
    options.ablations = True
    played = command._policies(options)
    assert {"kv", "product", "kv-without-hold", "kv-without-queue", "product-with-hold"} <= set(played)
    options.policies = "kv"
    with pytest.raises(ConfigError, match="--ablations: names its own policies"):
        command._policies(options)
