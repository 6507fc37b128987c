import gzip
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.sim.trace import TraceRow, read_trace

DATA = Path(__file__).parents[2] / "data"
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_an_azure_trace_gives_lengths_and_times_from_its_first_row():
    rows = read_trace(DATA / "azure_trace.csv")
    assert len(rows) == 6
    assert rows[0] == TraceRow(0.0, 374, 44)
    assert rows[1].at_s == pytest.approx(4.314579)
    assert (rows[1].input_tokens, rows[1].output_tokens) == (396, 109)


@pytest.mark.parametrize(
    "content",
    [
        f"{HEAD}2023-11-16 18:15:46.68,100.0,5.0\n",
        '{"timestamp": 1.5, "input_length": 100.0, "output_length": 5.0}',
    ],
)
def test_whole_numbers_may_have_a_point(content, tmp_path):
    (tmp_path / "trace").write_text(content)
    assert read_trace(tmp_path / "trace") == [TraceRow(0.0, 100, 5)]


def test_a_mooncake_trace_gives_prefixes_too():
    rows = read_trace(DATA / "mooncake_trace.jsonl")
    assert len(rows) == 6
    assert rows[0] == TraceRow(0.0, 6758, 500, tuple(range(14)))
    assert rows[1].prefix_ids[:2] == (0, 14)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no request"),
        ("a,b\n1,2\n", "line 1: expected an Azure trace, whose header has TIMESTAMP"),
        (f"{HEAD}yesterday,1,2\n", "line 2: TIMESTAMP: expected a date"),
        (
            f"{HEAD}\n2023-11-16 18:15:46.68,many,2\n",
            "line 3: ContextTokens: expected a whole number, got 'many'",
        ),
        (f"{HEAD}2023-11-16 18:15:46.68,1\n", "line 2: expected 3 columns, got 2"),
        (
            f"{HEAD}2023-11-16 18:15:46.68,1.5,2\n",
            "line 2: ContextTokens: expected a whole number, got '1.5'",
        ),
        (
            f"{HEAD}2023-11-16 18:15:46.68,1,-2\n",
            "line 2: token counts must be from 0 to 10,000,000, got 1 and",
        ),
        ('{"timestamp": 1, "input_length": 2}\n', r"line 1: .*`output_length`"),
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
    for name, message in {
        "cut": "line 1: the file is damaged or cut off here",
        "bad": "line 1: the file is damaged or cut off here",
        "binary": "line 1: expected UTF-8 text",
        "missing": "cannot be read: No such file",
    }.items():
        with pytest.raises(ConfigError, match=f"{name}: {message}"):
            read_trace(tmp_path / name)


LINE = '{"timestamp": %d, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}'


def test_marks_line_ends_and_blank_lines_make_no_difference(tmp_path):
    for name in ("azure_trace.csv", "mooncake_trace.jsonl"):
        path = tmp_path / name
        text = "\n\n".join((DATA / name).read_text().splitlines())
        path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
        assert read_trace(path) == read_trace(DATA / name)
        path.write_bytes(gzip.compress((DATA / name).read_bytes()))
        assert read_trace(path) == read_trace(DATA / name), "known by its content"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE.replace("1, 2", "1, 2, 3") % 0, "2 for input_length 700, got 3"),
        (LINE.replace("700", "2000") % 0, "4 for input_length 2,000, got 2"),
        (LINE.replace("1, 2", "-1") % 0, "hash_ids of numbers from 0"),
        (LINE % 10**15, "within 366 days of the first row's, got one 1.16e"),
        (LINE.replace("700", "1000000000000") % 0, "from 0 to 10,000,000, got 1000000000000"),
        ("[1]", "expected a JSON object"),
        ("x" * (2 << 20), "less than 1,048,576 bytes"),
    ],
)
def test_absurd_rows_are_refused_or_passed_over(line, message, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE % 0}\n{line}\n{LINE % 1000}\n")
    with pytest.raises(ConfigError, match="line 2: ") as error:
        read_trace(path)
    assert message in error.value.message
    assert len(error.value.message) < 400
    bad = []
    assert [row.at_s for row in read_trace(path, on_bad=bad.append)] == [0.0, 1.0]
    assert bad[0].message == error.value.message


def test_a_file_that_breaks_off_is_kept_so_far(tmp_path):
    path = tmp_path / "trace.gz"
    lines = [LINE.replace("[1, 2]", f"[{i * 7919 % 10007}]") % i for i in range(2000)]
    path.write_bytes(gzip.compress("\n".join(lines).encode())[:-2000])
    bad = []
    rows = read_trace(path, on_bad=bad.append)
    assert 100 < len(rows) < 2000
    assert f"line {len(rows) + 1}: the file is damaged or cut off here" in bad[0].message


def test_a_line_is_one_however_long_it_is(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE % 0}\n{'x' * (5 << 19)}\n{LINE % 1000}\noops\n" + "y" * (1 << 20))
    bad = []
    assert [row.at_s for row in read_trace(path, on_bad=bad.append)] == [0.0, 1.0]
    assert [error.message.split(": ")[1] for error in bad] == ["line 2", "line 4", "line 5"]


def test_rows_come_in_order_of_time_and_columns_by_name(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "GeneratedTokens,Extra,TIMESTAMP,ContextTokens\n\n"
        "5,x,2024-05-10 00:00:02.009930+00:00,7\n"
        "6,x,2024-05-10 00:00:01.009930+00:00,8\n"
    )
    assert read_trace(path) == [TraceRow(0.0, 8, 6), TraceRow(1.0, 7, 5)]
