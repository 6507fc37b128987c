"""The planner's log: what is kept, how much of it, and what a broken disk does."""

import os
import threading
import time

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.planner.decider import RoleDecision, ScalingDecision
from penstock.planner.decision_log import DecisionLog, LoggedRound, LoggedRun, older, read_entries
from penstock.planner.demand import ExpectedDemand, SloTargets
from penstock.planner.record import DecisionRecord, SeenDeployment
from penstock.runtime.observations import Digest

A = Role.AGGREGATED
RUN = LoggedRun(time_s=1.0, version="1", graph={"model": "demo"}, model_dir="/m")


def record(number, *, now=2, wanted=2, target=2, queued=0, **fields):
    expected = ExpectedDemand(
        rate_per_s=3.0,
        input_tokens=5,
        output_tokens=7,
        input_lengths=Digest(count=1, total=5.0, buckets={18: 1}),
    )
    term = RoleDecision(role=A, now=now, floor=1, reaction=1, keep=1, choice=wanted, why_not_fewer="so")
    return DecisionRecord(
        number=number,
        at_s=float(number),
        seen=SeenDeployment(seconds=10.0, queued=queued),
        now={A: now},
        decision=ScalingDecision(
            expected=expected, slo=SloTargets(ttft_s=0.1, itl_s=0.01), terms=(term,), gpus=wanted
        ),
        target={A: target},
        **fields,
    )


def rounds(path):
    return [entry for entry in read_entries(path) if isinstance(entry, LoggedRound)]


def numbers(path):
    return [(entry.record.number, entry.like_before) for entry in rounds(path)]


def test_what_is_put_is_read(tmp_path):
    path = tmp_path / "planner.jsonl"
    log = DecisionLog(path, RUN, time_s=lambda: 5.5)
    first = record(1, room={A: None}, rigid=((Role.DECODE, Role.PREFILL),), adds={A: 1})
    log.put(first)
    log.close()
    assert list(read_entries(path)) == [RUN, LoggedRound(time_s=5.5, record=first)]
    assert path.stat().st_mode & 0o077 == 0


def test_rounds_that_come_to_the_same_are_counted(tmp_path):
    path = tmp_path / "planner.jsonl"
    log = DecisionLog(path, RUN)
    log.put(record(1, is_floor=True))
    for number in range(2, 12):
        log.put(record(number, queued=number))
    log.put(record(12, is_floor=True))
    log.put(record(13))
    log.put(record(14, wanted=1))  # waits for its cool-down
    log.put(record(15, wanted=1))
    log.put(record(16, now=1, wanted=2))  # something is left to do, round after round
    log.put(record(17, now=1, wanted=2))
    log.put(record(18, now=1, wanted=2, held="a person has set it"))
    for number in (19, 20, 21):  # nothing is done until the wait is over
        log.put(record(number, now=1, wanted=2, waits=(f"decode: tried again in {100 - number} s",)))
    log.put(record(22, now=1, wanted=2, adds={A: 1}))
    log.close()
    assert numbers(path) == [(1, 0), (12, 10), (14, 1), (16, 1), (17, 0), (18, 0), (19, 0), (22, 2)]


def test_it_goes_on_in_a_new_file_and_never_grows_beyond_two(tmp_path):
    path = tmp_path / "planner.jsonl"
    log = DecisionLog(path, RUN, file_bytes_max=4000)
    for number in range(1, 101):
        log.put(record(number, is_floor=True))
    log.close()
    assert log.lost == 0
    assert sorted(tmp_path.iterdir()) == [path, older(path)]
    assert max(path.stat().st_size, older(path).stat().st_size) <= 4000 + 200
    kept = [entry.record.number for entry in rounds(path)]
    assert kept == list(range(kept[0], 101))
    assert len(kept) > 4
    first = next(read_entries(path))
    assert isinstance(first, LoggedRun)
    assert first.continues


def test_a_line_that_its_writer_could_not_end_is_no_harm(tmp_path):
    path = tmp_path / "planner.jsonl"
    log = DecisionLog(path, RUN)
    log.put(record(1))
    log.put(record(2, wanted=3))
    log.close()
    path.write_bytes(path.read_bytes()[:-30])
    assert numbers(path) == [(1, 0)]
    log = DecisionLog(path, RUN)
    log.put(record(1, wanted=4))
    log.close()
    assert [entry.record.decision.terms[0].choice for entry in rounds(path)] == [2, 4]


def test_a_disk_that_hangs_stops_nobody(tmp_path):
    """Opening a pipe that nobody reads takes for ever, as a hung mount does."""
    path = tmp_path / "planner.jsonl"
    os.mkfifo(path)
    log = DecisionLog(path, RUN)
    for number in range(1, 300):
        log.put(record(number, is_floor=True))
    assert 299 - 128 <= log.lost <= 299 - 126
    closing = threading.Thread(target=log.close)
    with path.open("rb") as reader:  # it goes on
        closing.start()
        assert b'"run"' in reader.read()
    closing.join()


def until(holds):
    end_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_full_disk_loses_lines_and_then_writes_again(tmp_path):
    path = tmp_path / "planner.jsonl"
    path.symlink_to("/dev/full")
    log = DecisionLog(path, RUN)
    log.put(record(1, is_floor=True))
    until(lambda: log.lost == 2)
    path.unlink()
    log.put(record(2, is_floor=True))
    log.close()
    assert log.lost == 2
    assert numbers(path) == [(2, 0)]


def test_what_is_no_log_is_refused(tmp_path):
    other = tmp_path / "other"
    for content, why in (
        (b"hello\nworld\n", "no line of a planner's log in 2 lines"),
        (b"\x00\xff" * 100, "no line of a planner's log in 1 lines"),
        (b"text\n" * 1000, "no line of a planner's log in 100 lines"),
    ):
        other.write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            list(read_entries(other))
    with pytest.raises(ConfigError, match="no such file"):
        list(read_entries(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is a directory"):
        list(read_entries(tmp_path))
