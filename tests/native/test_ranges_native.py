"""Ranges of memory: native against its Python reference, and what only native code does: threads."""

import errno
import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.native import native
from penstock.transfer.regions.ranges import check_bounds_python, coalesce_python, copy_ranges_python

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")

NUMBERS = st.one_of(st.integers(0, 40), st.integers(2**64 - 40, 2**64 - 1))
PAIRS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5), st.integers(0, 1), st.integers(0, 1))
)


def columns(rows: list[tuple[int, ...]], count: int) -> list[np.ndarray]:
    return list(np.array(rows, np.uint64).reshape(-1, count).T.copy())


@given(st.lists(st.tuples(NUMBERS, NUMBERS)), NUMBERS)
def test_bounds(rows, size):
    offsets, lengths = columns(rows, 2)
    assert native.check_bounds(offsets, lengths, size) == check_bounds_python(offsets, lengths, size)


@given(PAIRS, st.lists(st.booleans(), min_size=1))
def test_coalesce(rows, follows):
    for index in range(1, len(rows)):  # make neighbours frequent
        local, remote, length, *regions = rows[index - 1]
        if follows[index % len(follows)]:
            rows[index] = (local + length, remote + length, rows[index][2], *regions)
    given_columns = columns(rows, 5)
    for got, expected in zip(native.coalesce(*given_columns), coalesce_python(*given_columns), strict=True):
        np.testing.assert_array_equal(got, expected)
    same = np.zeros(len(rows), np.uint64)
    expected = coalesce_python(*given_columns[:3], same, same)[:3]
    for got, wanted in zip(native.coalesce(*given_columns[:3]), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def random_copy(count: int, bytes_max: int, seed: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Make source, target, and (target, source, length) columns whose targets do not overlap."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, bytes_max, count).astype(np.uint64)
    gaps = random.integers(0, 100, count).astype(np.uint64)
    starts = np.cumsum(lengths + gaps) - lengths
    size = int(starts[-1] + lengths[-1])
    source, target = random.integers(0, 256, size, np.uint8), np.zeros(size, np.uint8)
    sources = (random.random(count) * (size - lengths)).astype(np.uint64) + np.uint64(source.ctypes.data)
    return source, target, [starts + np.uint64(target.ctypes.data), sources, lengths]


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("count", "bytes_max"), [(1, 2), (50, 300), (900, 2000), (3, 3_000_000), (40, 700_000)]
)
def test_copies_of_any_size_on_any_number_of_threads(threads, count, bytes_max):
    _, target, ranges = random_copy(count, bytes_max, seed=count)
    native.copy_ranges(*ranges, threads)
    got = target.copy()
    target[:] = 0
    copy_ranges_python(*ranges)
    np.testing.assert_array_equal(got, target)


@pytest.mark.parametrize("threads", [1, 3])
def test_another_process_is_read_on_any_number_of_threads(threads):
    source, target, ranges = random_copy(3000, 700, seed=1)
    assert native.read_process(os.getpid(), *ranges, threads) == (int(ranges[2].sum()), 0)
    got = target.copy()
    target[:] = 0
    assert native.write_process(os.getpid(), ranges[1], ranges[0], ranges[2], threads)[1] == 0
    np.testing.assert_array_equal(got, target)
    target[:] = 0
    copy_ranges_python(*ranges)
    np.testing.assert_array_equal(got, target)
    assert source.any()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stop_ends_a_call_early(threads):
    source, target, ranges = random_copy(1, 9_000_000, seed=3)
    set_already = np.ones(1, np.uint8)
    assert not native.copy_ranges(*ranges, threads, set_already)
    assert native.read_process(os.getpid(), *ranges, threads, set_already) == (0, errno.ECANCELED)
    assert not copy_ranges_python(*ranges, set_already)
    assert not target.any()
    assert native.copy_ranges(*ranges, threads, np.zeros(1, np.uint8))
    assert target.any()
    assert source.any()
    with pytest.raises(ValueError, match="one byte"):
        native.copy_ranges(*ranges, threads, np.zeros(2, np.uint8))


def test_several_callers_share_the_threads():
    copies = [random_copy(20, 200_000, seed) for seed in range(6)]
    callers = [threading.Thread(target=native.copy_ranges, args=(*ranges, 3)) for _, _, ranges in copies]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for _, target, ranges in copies:
        got = target.copy()
        target[:] = 0
        copy_ranges_python(*ranges)
        np.testing.assert_array_equal(got, target)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    source, target, ranges = random_copy(10, 500_000, seed=0)
    native.copy_ranges(*ranges, 3)
    expected = target.copy()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        target[:] = 0
        native.copy_ranges(*ranges, 3)
        os._exit(0 if (target == expected).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert source.any()


def test_a_long_copy_lets_other_threads_run(others_run_beside):
    source, target = np.zeros((2, 20_000_000), np.uint8)
    row = [np.array([value], np.uint64) for value in (target.ctypes.data, source.ctypes.data, source.size)]
    assert others_run_beside(lambda: native.copy_ranges(*row, 1))
