import pytest

from penstock.bench.exchange import Exchange
from penstock.bench.totals import Slo, Totals


def _exchange(due_s=0.0, *, tokens=5, gap_s=0.1, ttft_s=0.5, per_chunk=1, failure=None) -> Exchange:
    exchange = Exchange(due_s, sent_s=due_s + 0.001)
    for chunk in range(tokens // per_chunk):
        exchange.feed(b'data: {"choices":[{"text":"a"}]}\n\n', due_s + ttft_s + chunk * gap_s)
    usage = f'data: {{"usage":{{"prompt_tokens":9,"completion_tokens":{tokens}}}}}\n\n'
    exchange.feed(usage.encode() + b"data: [DONE]\n\n", due_s)
    if failure:
        exchange.fail(failure, f"because of {failure}")
    exchange.finish(due_s + 1.0)
    return exchange


def test_rates_and_percentiles_are_of_what_succeeded():
    totals = Totals(Slo())
    for due_s in (0.0, 1.0):
        totals.add(_exchange(due_s))
    totals.add(_exchange(1.0, failure="http_429"))
    figures = totals.figures()
    assert figures["requests"] == 3
    assert figures["failed_requests"] == figures["failed_http_429"] == 1
    assert figures["duration_s"] == 2.0
    assert figures["requests_per_s"] == 1.0
    assert figures["output_tokens_per_s"] == 5.0
    assert figures["input_tokens_per_s"] == 9.0
    assert figures["ttft_ms_p50"] == pytest.approx(500)
    assert figures["itl_ms_p99"] == pytest.approx(100)
    assert figures["e2e_ms_p90"] == pytest.approx(1000)
    assert figures["send_lag_ms_p99"] == pytest.approx(1)
    assert "goodput_fraction" not in figures
    assert totals.problems() == ["1 of 3 requests failed: http_429: because of http_429"]
    assert len(totals.samples()["itl_s"]) == 8


def test_a_chunk_of_several_tokens_shares_its_gap():
    totals = Totals(Slo())
    totals.add(_exchange(tokens=8, per_chunk=2, gap_s=0.7))
    figures = totals.figures()
    assert figures["chunk_gap_ms_p50"] == pytest.approx(700)
    assert figures["itl_ms_p50"] == pytest.approx(300)  # 7 tokens after the first in 3 gaps
    assert figures["tokens_per_chunk"] == 2.0


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_s=0.5), 2),
        (Slo(ttft_s=0.4), 1),
        (Slo(itl_s=0.05), 1),
        (Slo(ttft_s=0.4, itl_s=0.05), 0),
        (Slo(ttft_s=9, itl_s=9), 2),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(slo, good):
    totals = Totals(slo)
    totals.add(_exchange(ttft_s=0.5, gap_s=0.05))
    totals.add(_exchange(ttft_s=0.3, gap_s=0.1))
    totals.add(_exchange(failure="timeout"))
    assert totals.figures()["goodput_fraction"] == pytest.approx(good / 3)
    assert totals.figures()["goodput_requests_per_s"] == pytest.approx(good)


def test_single_tokens_have_no_time_between_them():
    totals = Totals(Slo(itl_s=0.001))
    totals.add(_exchange(tokens=1))
    assert "itl_ms_p50" not in totals.figures()
    assert totals.figures()["goodput_fraction"] == 1.0


def test_many_samples_are_thinned():
    totals = Totals(Slo())
    one = _exchange()
    for _ in range(25_000):
        totals.add(one)
    assert len(totals.samples()["ttft_s"]) == 8334
