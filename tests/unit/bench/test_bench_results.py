"""What a load on a server came to: one exchange, the totals of all, and the report."""

import json

import pytest

from penstock.bench.client import MeasuredRequest, RequestFailure
from penstock.bench.report import BenchReport
from penstock.bench.serve import BenchTargets, Totals
from penstock.core.errors import ConfigError


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _chat(text: str | None, **more: object) -> bytes:
    return _event({"choices": [{"index": 0, "delta": {"content": text}}], **more})


DONE = b"data: [DONE]\n\n"


def test_times_count_from_when_it_was_due():
    exchange = MeasuredRequest(due_s=10.0, sent_s=10.5)
    exchange.feed(_chat(""), 11.0)  # the role, without text
    exchange.feed(_chat("a"), 12.0)
    exchange.feed(_chat("b") + _chat("c"), 13.0)
    exchange.feed(_event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}) + DONE, 14.0)
    exchange.finish(15.0)
    assert exchange.failure is None
    assert exchange.ttft_s == 2.0
    assert exchange.gaps_s == [1.0, 0.0]
    assert exchange.e2e_s == 5.0
    assert exchange.output_tokens == 7
    assert exchange.time_per_token_s == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    "event",
    [
        _event({"choices": [{"text": "a"}]}),
        _event({"choices": [{"delta": {"reasoning_content": "a"}}]}),
        b': keep-alive\r\n\r\nevent: x\r\ndata:{"choices":[{"text":"a"}]}\r\n\r\n',
    ],
)
def test_text_is_found_wherever_a_server_puts_it(event):
    exchange = MeasuredRequest(due_s=0.0)
    exchange.feed(event + DONE, 1.0)
    exchange.finish(2.0)
    assert exchange.failure is None
    assert exchange.output_tokens == 1
    assert exchange.time_per_token_s is None


@pytest.mark.parametrize(
    ("body", "failure", "message"),
    [
        (_chat("a"), RequestFailure.DISCONNECTED, "before its last event"),
        (DONE, RequestFailure.EMPTY, "no token"),
        (b"data: {oops\n\n" + DONE, RequestFailure.MALFORMED, "oops"),
        (
            _chat("a") + _event({"error": {"message": "worker\nlost"}}),
            RequestFailure.STREAM_ERROR,
            "worker lost",
        ),
        (_event({"error": "busy"}) + DONE, RequestFailure.STREAM_ERROR, "busy"),
        (b"x" * (1 << 21), RequestFailure.MALFORMED, "an event of more than"),
    ],
)
def test_the_first_reason_of_a_failure_is_kept(body, failure, message):
    exchange = MeasuredRequest(due_s=0.0)
    exchange.feed(body, 1.0)
    exchange.finish(2.0)
    assert exchange.failure == failure
    assert message in exchange.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no such model"}}', "no such model"),
        (b"<h1>Bad\nGateway</h1>", "<h1>Bad Gateway</h1>"),
    ],
)
def test_a_refusal_is_named_by_its_status(body, message):
    exchange = MeasuredRequest(due_s=0.0)
    exchange.refuse(404, body)
    exchange.finish(1.0)
    assert exchange.failure == "http_404"
    assert exchange.message == message


def _exchange(due_s=0.0, *, tokens=5, gap_s=0.1, ttft_s=0.5, per_chunk=1, failure=None) -> MeasuredRequest:
    exchange = MeasuredRequest(due_s, sent_s=due_s + 0.001)
    for chunk in range(tokens // per_chunk):
        exchange.feed(b'data: {"choices":[{"text":"a"}]}\n\n', due_s + ttft_s + chunk * gap_s)
    usage = f'data: {{"usage":{{"prompt_tokens":9,"completion_tokens":{tokens}}}}}\n\n'
    exchange.feed(usage.encode() + b"data: [DONE]\n\n", due_s)
    if failure:
        exchange.fail(failure, f"because of {failure}")
    exchange.finish(due_s + 1.0)
    return exchange


def test_rates_and_percentiles_are_of_what_succeeded():
    totals = Totals(BenchTargets())
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
    totals = Totals(BenchTargets())
    totals.add(_exchange(tokens=8, per_chunk=2, gap_s=0.7))
    figures = totals.figures()
    assert figures["chunk_gap_ms_p50"] == pytest.approx(700)
    assert figures["itl_ms_p50"] == pytest.approx(300)  # 7 tokens after the first in 3 gaps
    assert figures["tokens_per_chunk"] == 2.0


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (BenchTargets(ttft_s=0.5), 2),
        (BenchTargets(ttft_s=0.4), 1),
        (BenchTargets(itl_s=0.05), 1),
        (BenchTargets(ttft_s=0.4, itl_s=0.05), 0),
        (BenchTargets(ttft_s=9, itl_s=9), 2),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(slo, good):
    totals = Totals(slo)
    totals.add(_exchange(ttft_s=0.5, gap_s=0.05))
    totals.add(_exchange(ttft_s=0.3, gap_s=0.1))
    totals.add(_exchange(failure="timeout"))
    assert totals.figures()["goodput_fraction"] == pytest.approx(good / 3)
    assert totals.figures()["goodput_requests_per_s"] == pytest.approx(good)


KEYS = ["name", "schema", "commit", "date", "machine", "config", "samples", "limits", "figures"]


def _report(**changes) -> BenchReport:
    usual = {
        "name": "thing",
        "config": {"size": 3},
        "figures": {"thing_per_s": 12_345_678.9, "thing_ms": 1.25},
        "samples": {"thing_s": [0.5, 0.25]},
        "limits": {"best_per_s": 20.0},
    }
    return BenchReport(**usual | changes)


def test_the_json_has_one_schema(tmp_path):
    path = tmp_path / "out.json"
    _report(problems=["not written"]).write(path)
    written = json.loads(path.read_text())
    assert list(written) == KEYS
    assert written["figures"] == {"thing_per_s": 12_345_678.9, "thing_ms": 1.25}
    assert written["samples"] == {"thing_s": [0.5, 0.25]}
    assert set(written["machine"]) == {"cpu", "cores", "memory_bytes", "system", "architecture", "python"}
    assert written["date"].endswith("+00:00")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"--json: .*: cannot be written: Is a directory"):
        _report().write(tmp_path)
