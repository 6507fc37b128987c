"""What processes print is passed on whole, and kept in a log that stays bounded."""

import contextlib
import os
import threading
import time

from penstock.deploy.supervisor.output import STDERR, STDOUT, LogFile, ProcessOutput, before


def kept(path):
    """Give (process, text) of each line of a log."""
    return [(line[20:31].rstrip(), line[32:]) for line in path.read_text().splitlines()]


def entered(path):
    output = ProcessOutput()
    output.log = LogFile(path)
    return output


def test_lines_of_both_outputs_are_passed_on_and_kept_under_the_process_name(tmp_path, capfd):
    with entered(tmp_path / "log") as output:
        source = output.source("worker-1")
        os.write(source.ends[0], b"to stdout\nand half")
        os.write(source.ends[1], b"to stderr\n")
        os.write(source.ends[0], b" a line\n")
        source.close()
    out, err = capfd.readouterr()
    assert (out, err) == ("to stdout\nand half a line\n", "to stderr\n")
    assert sorted(kept(tmp_path / "log")) == [
        ("worker-1", "and half a line"),
        ("worker-1", "to stderr"),
        ("worker-1", "to stdout"),
    ]


def test_a_line_without_an_end_is_kept_when_its_process_ends_and_a_bar_as_it_was_last(tmp_path, capfd):
    with entered(tmp_path / "log") as output:
        source = output.source("spare")
        source.name = "worker-2"
        os.write(source.ends[1], b"  0 %\r 50 %\r100 %\r\nlast words \xff")
        source.close()
    assert kept(tmp_path / "log") == [
        ("worker-2", "100 %"),
        ("worker-2", "last words \N{REPLACEMENT CHARACTER}"),
    ]
    assert capfd.readouterr().err.startswith("  0 %\r 50 %\r100 %\r\nlast words ")


def test_a_process_that_holds_its_output_open_does_not_keep_the_deployment(tmp_path):
    before = threading.active_count()
    with entered(tmp_path / "log") as output:
        source = output.source("worker-1")
        os.write(source.ends[STDOUT - 1], b"still here\n")
    assert kept(tmp_path / "log") == [("worker-1", "still here")]
    assert threading.active_count() == before
    source.close()


def test_a_closed_stderr_loses_nothing_of_the_log(tmp_path):
    saved = os.dup(STDERR)
    try:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, STDERR)
        os.close(writer)
        with entered(tmp_path / "log") as output:
            source = output.source("worker-1")
            os.write(source.ends[1], b"nobody reads this\n")
            source.close()
    finally:
        os.dup2(saved, STDERR)
        os.close(saved)
    assert kept(tmp_path / "log") == [("worker-1", "nobody reads this")]


def test_the_log_keeps_the_last_half_and_the_one_before(tmp_path):
    path = tmp_path / "log"
    log = LogFile(path, half_bytes=400)
    for number in range(40):
        log.write("worker-1", [f"line {number:02}"])
    log.close()
    lines = [text for _, text in kept(before(path)) + kept(path)]
    assert lines == [f"line {number:02}" for number in range(40 - len(lines), 40)]
    assert len(lines) > 10
    assert max(path.stat().st_size, before(path).stat().st_size) <= 400
    assert path.stat().st_mode & 0o077 == 0


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path):
    log = LogFile(tmp_path / "absent" / "log")
    log.write("worker-1", ["lost"])
    log.close()


def test_the_supervisors_own_lines_are_kept_once(tmp_path, capfd):
    with entered(tmp_path / "log") as output:
        stream = output.tee("supervisor")
        print("client_refused peer=x", file=stream, flush=True)
        output.note("worker-1", "ready     mock")
    assert capfd.readouterr().err == "client_refused peer=x\n"
    assert kept(tmp_path / "log") == [("supervisor", "client_refused peer=x"), ("worker-1", "ready     mock")]


@contextlib.contextmanager
def unread(target):
    """Have `target` be a pipe that nobody reads; gives the end to read."""
    saved = os.dup(target)
    reader, writer = os.pipe()
    os.dup2(writer, target)
    os.close(writer)
    try:
        yield reader
    finally:
        os.dup2(saved, target)
        os.close(saved)


def test_an_output_that_nobody_reads_holds_up_neither_children_nor_the_supervisor(tmp_path):
    """4 MiB of lines: more than the pipe and what is kept for its reader, who is told how many are missing."""
    line, count, back = b"x" * 1023 + b"\n", 4096, "the reader is back\n"
    made = ProcessOutput()
    made.log = LogFile(tmp_path / "log", half_bytes=64 << 20)
    with unread(STDOUT) as reader, made as output:
        source = output.source("worker-1")
        for _ in range(count):
            os.write(source.ends[0], line)
            output.print("worker-1    ready\n")
        source.close()
        parts: list[bytes] = []
        taker = threading.Thread(target=lambda: parts.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
        taker.start()
        num_back = 0
        while back.encode() not in b"".join(parts):
            output.print(back)
            num_back += 1
            time.sleep(0.05)
    taker.join()
    os.close(reader)
    shown = b"".join(parts).splitlines()
    gaps = [int(each.split()[1]) for each in shown if b"lines are not shown" in each]
    assert sum(gaps) > 1000
    assert sum(gaps) + len(shown) - len(gaps) == 2 * count + num_back
    assert sum(1 for _ in kept(tmp_path / "log")) == count
