import gzip
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.sim.trace import TraceRow, read_trace

DATA = Path(__file__).parents[2] / "data"


def test_an_azure_trace_gives_lengths_and_times_from_its_first_row():
    rows = read_trace(DATA / "azure_trace.csv")
    assert len(rows) == 6
    assert rows[0] == TraceRow(0.0, 374, 44)
    assert rows[1].at_s == pytest.approx(4.314579)
    assert (rows[1].input_tokens, rows[1].output_tokens) == (396, 109)


def test_a_mooncake_trace_gives_prefixes_too():
    rows = read_trace(DATA / "mooncake_trace.jsonl")
    assert len(rows) == 6
    assert rows[0] == TraceRow(0.0, 6758, 500, tuple(range(14)))
    assert rows[1].prefix_ids[:2] == (0, 14)


@pytest.mark.parametrize("name", ["azure_trace.csv", "mooncake_trace.jsonl"])
def test_a_gzipped_trace_is_known_by_its_content(name, tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress((DATA / name).read_bytes()))
    assert read_trace(path) == read_trace(DATA / name)


def test_rows_come_in_order_of_time_and_columns_by_name(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "GeneratedTokens,Extra,TIMESTAMP,ContextTokens\n\n"
        "5,x,2024-05-10 00:00:02.009930+00:00,7\n"
        "6,x,2024-05-10 00:00:01.009930+00:00,8\n"
    )
    assert read_trace(path) == [TraceRow(0.0, 8, 6), TraceRow(1.0, 7, 5)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no request"),
        ("a,b\n1,2\n", "line 1: expected an Azure trace, whose header has TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: TIMESTAMP: expected a date"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n\n2023-11-16 18:15:46.68,many,2\n",
            "line 3: ContextTokens: expected a whole number, got 'many'",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1\n",
            "line 2: expected 3 columns, got 2",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1,-2\n",
            "line 2: token counts must be >= 0, got 1 and -2",
        ),
        ('{"timestamp": 1, "input_length": 2}\n', r"line 1: .*`output_length`"),
        ('{"timestamp": 1, "input_length": "x", "output_length": 1}\n', r"line 1: .*input_length"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 1}\n{oops\n', "line 2: "),
    ],
)
def test_a_wrong_trace_names_file_and_line(content, message, tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(path)
    assert str(path) in error.value.message
    assert "\n" not in error.value.message


def test_a_damaged_or_missing_file_is_one_line(tmp_path):
    whole = gzip.compress(b"x" * 10_000)
    for name, content in {
        "cut": whole[:-10],
        "bad": whole[:5] + b"\xff" * 40,
        "binary": b"\xff\xfe{",
    }.items():
        (tmp_path / name).write_bytes(content)
    for name in ("cut", "bad", "binary", "missing"):
        with pytest.raises(ConfigError, match=r"cannot be read|not a trace"):
            read_trace(tmp_path / name)


def test_bad_lines_can_be_passed_over_and_are_told(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1000, "input_length": 2, "output_length": 1}\n{oops\n'
        '{"timestamp": 3000, "input_length": 2, "output_length": 1}\n{"timestamp": 1}\n'
    )
    bad = []
    assert [row.at_s for row in read_trace(path, on_bad=bad.append)] == [0.0, 2.0]
    assert [error.message.split(": ")[1] for error in bad] == ["line 2", "line 4"]
