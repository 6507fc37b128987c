"""What `python -m benchmarks disagg` makes of what it measured: the load, the opponent, the figures."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from benchmarks.disagg import figures
from benchmarks.disagg.choice import Point, best_chunk
from benchmarks.disagg.measured import Measured, measure, measure_quiet
from benchmarks.disagg.plot import draw
from benchmarks.disagg.traffic import Asked, Traffic
from benchmarks.disagg.workload import StreamsAndPrompts
from penstock.core.ids import RequestId
from penstock.worker.step_log import LoggedStep


def point(chunk, itl, ttft, tokens=100.0):
    return Point(
        chunk=chunk,
        itl_p99_ms=itl,
        itl_p999_ms=2 * itl,
        itl_max_ms=3 * itl,
        ttft_p99_ms=ttft,
        output_tokens_per_s=tokens,
    )


def step(at_s, **tokens):
    return LoggedStep(at_s=at_s, tokens=tuple((RequestId(name), count) for name, count in tokens.items()))


class TestBestChunk:
    def test_is_the_lowest_itl_of_those_that_are_no_later_with_first_tokens(self):
        points = [point(64, 40, 2000), point(128, 60, 900), point(256, 90, 700)]
        assert best_chunk(points, ttft_p99_ms=1000).chunk == 128
        assert best_chunk(points, ttft_p99_ms=900).chunk == 128
        assert best_chunk(points, ttft_p99_ms=899).chunk == 256
        assert best_chunk(points, ttft_p99_ms=5000).chunk == 64


def workload(**changes):
    return StreamsAndPrompts(
        **{"streams": 1, "seconds": 100.0, "seed": 0, "prompt_tokens_min": 2100, "prompt_tokens_max": 2600}
        | changes
    )


class TestStreamsAndPrompts:
    def test_prompts_are_long_and_come_at_the_rate_within_the_time(self):
        load = workload(seconds=2000.0)
        arrivals = load.long_prompts(0.8)
        moments = [arrival.at_s for arrival in arrivals]
        assert len(arrivals) == 1600
        assert 0 <= moments[0] < moments[-1] < 2000
        assert moments == sorted(moments)
        tokens = [arrival.input_tokens for arrival in arrivals]
        assert (min(tokens), max(tokens)) == (2100, 2600)
        assert len(load.long_prompts(0.0001)) >= 1, "the shortest of runs has some"

    def test_even_prompts_come_one_every_so_often_and_are_as_many_and_as_long(self):
        even = workload(arrivals="even").long_prompts(0.5)
        assert np.diff([arrival.at_s for arrival in even]) == pytest.approx(2.0)
        assert len(even) == 50
        assert 0 < even[0].at_s < even[-1].at_s < 100
        assert len({arrival.input_tokens for arrival in even}) > 10


class TestMeasured:
    def test_streams_and_prompts_are_told_apart_and_only_the_time_that_counts_counts(self):
        traffic = Traffic(begin_s=10.0, end_s=20.0, prompts=[Asked("long-0", due_s=11.0, ttft_s=1.1)])
        measured = measure(
            traffic,
            {
                "prefill-1": [step(12.0, **{"long-0": 1})],
                "decode-1": [
                    step(9.0, stream=1),
                    step(10.5, stream=1),
                    step(12.5, stream=1, **{"long-0": 1}),
                    step(12.6, **{"long-0": 1}),
                    step(12.8, **{"long-0": 1}),
                    step(21.0, stream=1),
                ],
            },
        )
        assert measured.itl_s.tolist() == [1.5, 2.0]
        assert measured.ttft_s.tolist() == [1.0]
        assert measured.prompt_itl_s == pytest.approx([0.5, 0.1, 0.2])
        assert measured.kv_transfer_s == pytest.approx([0.5 - 0.15])
        assert measured.output_tokens_per_s == pytest.approx(6 / 10)
        assert measured.waiting == 0

    def test_a_prompt_whose_first_token_came_after_the_end_was_waiting_then(self):
        traffic = Traffic(begin_s=0.0, end_s=5.0, prompts=[Asked("a", 4.0, 2.0), Asked("b", 1.0, 1.0)])
        measured = measure(traffic, {"w": [step(2.0, b=1), step(6.0, a=1)]})
        assert measured.waiting == 1
        assert sorted(measured.ttft_s) == [1.0, 2.0]

    def test_quiet_prompts_tell_what_a_prompt_and_a_kv_transfer_take(self):
        traffic = Traffic(quiet=[Asked("a", due_s=1.0, ttft_s=0.5), Asked("lost", due_s=3.0, ttft_s=0.5)])
        logs = {
            "prefill-1": [step(1.5, a=1)],
            "decode-1": [step(1.75, a=1), step(1.875, a=1), step(2.0, a=1)],
        }
        assert measure_quiet(traffic, logs) == ([0.5], [0.125])


class TestFigures:
    def side(self, itl_ms, tokens_per_s=100.0):
        """One turn for each of these."""
        ones = np.ones(4)
        return [
            Measured(
                itl_s=np.full(10, itl / 1e3), ttft_s=ones * itl, prompt_itl_s=ones, kv_transfer_s=ones * itl,
                output_tokens_per_s=tokens_per_s + itl, waiting=1,
            )
            for itl in itl_ms
        ]  # fmt: skip

    def test_the_middle_turn_of_each_figure_counts(self):
        found = figures.compared(self.side([10, 50, 12]), self.side([90, 36, 30], 44.0))
        assert found["itl_p99_ms_disaggregated"] == pytest.approx(12)
        assert found["itl_p99_ms_aggregated"] == pytest.approx(36)
        assert found["itl_p99_ratio"] == pytest.approx(3)
        assert found["output_tokens_ratio"] == pytest.approx(112 / 80)
        assert (found["prompts_aggregated"], found["prompts_waiting_at_end_aggregated"]) == (12, 3)
        point = figures.point_of(128, self.side([90, 36, 30]))
        assert (point.itl_p99_ms, point.ttft_p99_ms) == pytest.approx((36, 36_000))

    def test_where_none_may_be_late_another_chunk_may_be_the_opponent(self):
        found = figures.strict(self.side([10]), point(64, 40, 2000, tokens=55.0))
        assert found["itl_p99_ms_disaggregated_strict"] == pytest.approx(10)
        assert found["chunk_aggregated_strict"] == 64
        assert found["itl_p99_ratio_strict"] == pytest.approx(4)
        assert found["output_tokens_ratio_strict"] == pytest.approx(2)
        assert next(iter(found)) == "itl_p99_ratio_strict", "what was promised leads"

    def test_a_kv_transfer_without_streams_is_held_against_a_copy(self):
        found = figures.kv_transfer([0.004, 0.002, 0.003], self.side([5, 7, 6]), 1 << 20, 1 << 30)
        assert found["kv_transfer_ms"] == 3
        assert found["kv_transfer_ms_p50_loaded"] == 6000
        assert found["kv_transfer_ms_p90"] == pytest.approx(3.8)
        assert found["kv_transfer_over_memcpy"] == pytest.approx(3 / (1e3 / 1024))

    def test_checksums_are_compared_within_a_turn(self):
        summed, unsummed = [[0.006], [0.03], [0.012]], [[0.004], [0.01], [0.01]]
        found = figures.kv_transfers(summed, unsummed, 1 << 20, 1 << 30)
        assert found["kv_transfer_ms"] == pytest.approx(12)
        assert found["kv_transfer_ms_unsummed"] == pytest.approx(10)
        assert found["kv_transfer_ratio_summed"] == pytest.approx(1.5), "a slow turn slows both"


def test_the_plot_is_xml_with_a_dot_for_each_chunk_and_the_best_one_full():
    points = [point(64, 40, 2000), point(128, 60, 900)]
    root = ET.fromstring(draw(point(0, 12, 1000), point(-2, 11, 1500), points, points[1]))
    dots = [element.get("fill") for element in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert dots == ["#fff", "#9ca3af"] * 3
