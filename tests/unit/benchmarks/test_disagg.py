"""What `python -m benchmarks disagg` makes of what it measured: the load, the opponent, the figures."""

import pytest

from benchmarks.disagg.choice import Point, best_chunk
from benchmarks.disagg.measured import measure
from benchmarks.disagg.traffic import Asked, Traffic
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
