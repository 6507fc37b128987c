"""Streams of ranges over real sockets, native and reference; what timing decides is far from where it could go either way."""

import errno
import os
import socket
import threading

import numpy as np
import pytest

from penstock.core.native import native
from penstock.transfer.transports.tcp import streams
from penstock.transfer.transports.tcp.streams import StreamEnd, receive_ranges, send_ranges


@pytest.fixture(params=["native", "python"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(streams, "native", None)
    elif native is None:
        pytest.skip("installed with PENSTOCK_NATIVE=OFF")


@pytest.fixture(params=[True, False], ids=["blocking", "non-blocking"])
def pair(request):
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(request.param)
    with ours, theirs:
        yield ours, theirs


def scattered(count: int, bytes_max: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make memory and (addresses, lengths) of ranges in it, in no order, some of them empty."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, bytes_max, count)
    offsets = np.cumsum(lengths + 3)
    memory = random.integers(0, 256, int(offsets[-1] + bytes_max), np.uint8)
    order = random.permutation(count)
    return memory, (offsets[order] + memory.ctypes.data).astype(np.uint64), lengths[order].astype(np.uint64)


def joined(memory: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> bytes:
    starts = (addresses - np.uint64(memory.ctypes.data)).tolist()
    parts = zip(starts, lengths.tolist(), strict=True)
    return b"".join(memory[start : start + size].tobytes() for start, size in parts)


def beside(call):
    """Run a call on a thread; returns what gives its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def result():
        thread.join(20)
        return results[0]

    return result


@pytest.mark.parametrize(("count", "bytes_max"), [(1, 2_000_000), (30, 100_000), (3000, 500)])
def test_all_bytes_arrive_where_they_belong(pair, count, bytes_max):
    sent = scattered(count, bytes_max, seed=1)
    total = int(sent[2].sum())
    into = np.zeros(total, np.uint8)
    pieces = np.array([0, 1, total // 3, total // 3, total - 1, total], np.uint64)
    sending = beside(lambda: send_ranges(pair[0].fileno(), *sent[1:]))
    got = receive_ranges(pair[1].fileno(), pieces[:-1] + np.uint64(into.ctypes.data), np.diff(pieces))
    assert (got.moved_bytes, got.end, got.errno) == (total, StreamEnd.DONE, 0)
    assert sending() == got
    assert into.tobytes() == joined(*sent)


def test_going_on_where_another_call_ended(pair):
    sent = scattered(50, 400, seed=3)
    whole = joined(*sent)
    into = np.zeros(len(whole), np.uint8)
    target = np.array([into.ctypes.data], np.uint64), np.array([len(whole)], np.uint64)
    for skip in (0, 1, 999, len(whole) - 1):
        assert send_ranges(pair[0].fileno(), *sent[1:], skip_bytes=skip).end is StreamEnd.DONE
        got = receive_ranges(pair[1].fileno(), *target, skip_bytes=skip)
        assert got.moved_bytes == len(whole) - skip
        assert into[skip:].tobytes() == whole[skip:]
    assert send_ranges(pair[0].fileno(), *sent[1:], skip_bytes=len(whole)).end is StreamEnd.DONE


def test_nothing_more_is_taken(pair):
    pair[0].send(b"first second")
    into = np.zeros(6, np.uint8)
    row = np.array([into.ctypes.data], np.uint64), np.array([6], np.uint64)
    assert receive_ranges(pair[1].fileno(), *row).end is StreamEnd.DONE
    assert into.tobytes() == b"first "
    assert pair[1].recv(100) == b"second"


def test_a_silent_peer_and_a_deadline(pair):
    into = np.zeros(100, np.uint8)
    row = np.array([into.ctypes.data], np.uint64), np.array([100], np.uint64)
    pair[0].send(b"abc")
    got = receive_ranges(pair[1].fileno(), *row, idle_s=0.02)
    assert (got.moved_bytes, got.end) == (3, StreamEnd.IDLE)
    got = receive_ranges(pair[1].fileno(), *row, deadline_s=0.02)
    assert (got.moved_bytes, got.end) == (0, StreamEnd.DEADLINE)
    got = receive_ranges(pair[1].fileno(), *row, idle_s=5, deadline_s=0.02)
    assert got.end is StreamEnd.DEADLINE


def test_a_peer_that_reads_nothing(pair):
    memory = np.zeros(10_000_000, np.uint8)
    row = np.array([memory.ctypes.data], np.uint64), np.array([memory.size], np.uint64)
    got = send_ranges(pair[0].fileno(), *row, idle_s=0.02)
    assert got.end is StreamEnd.IDLE
    assert 0 < got.moved_bytes < memory.size


def test_a_peer_that_goes(pair):
    into = np.zeros(100, np.uint8)
    row = np.array([into.ctypes.data], np.uint64), np.array([100], np.uint64)
    receiving = beside(lambda: receive_ranges(pair[1].fileno(), *row))
    pair[0].send(b"12345")
    pair[0].close()
    got = receiving()
    assert (got.moved_bytes, got.end) == (5, StreamEnd.CLOSED)
    got = send_ranges(pair[1].fileno(), *row)
    assert (got.moved_bytes, got.end, got.errno) == (0, StreamEnd.CLOSED, errno.EPIPE)


def test_no_socket_and_no_memory(pair):
    row = np.array([8], np.uint64), np.array([100], np.uint64)
    if streams.native is not None:  # the reference looks at memory itself
        got = send_ranges(pair[0].fileno(), *row)
        assert (got.end, got.errno) == (StreamEnd.FAILED, errno.EFAULT)
    reader, writer = os.pipe()
    into = np.zeros(100, np.uint8)
    row = np.array([into.ctypes.data], np.uint64), np.array([100], np.uint64)
    try:
        got = receive_ranges(reader, *row)
        assert (got.end, got.errno) == (StreamEnd.FAILED, errno.ENOTSOCK)
    finally:
        os.close(reader)
        os.close(writer)
