import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.core.errors import ChecksumMismatch
from penstock.testing.loop import run_async
from penstock.transfer.regions import copies
from penstock.transfer.regions.copies import CopyMove, Mapped, on_thread

SIZE = 10_000


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(copies, "_SLICE_BYTES", 1000)


def columns(target: np.ndarray, source: np.ndarray, rows: list[tuple[int, int, int]]) -> list[np.ndarray]:
    to, at, lengths = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    return [to + np.uint64(target.ctypes.data), at + np.uint64(source.ctypes.data), lengths]


def copy(ranges: list[np.ndarray], *, checksum: bool = False, reach: Mapped | None = None) -> None:
    with ThreadPoolExecutor(1) as executor:
        move = CopyMove(
            *ranges,
            executor=executor,
            threads=2,
            inline_bytes_max=100,
            checksum=checksum,
            reach=reach or Mapped(),
        )
        if not move.run_now():
            run_async(move.run())


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, SIZE)],
        [(0, 0, 1000)],
        [(0, 5000, 1001), (2000, 0, 1)],
        [(7, 0, 4500), (4507, 4600, 5000), (9600, 9999, 1)],
        [(0, 0, 90)],
    ],
)
@pytest.mark.parametrize("checksum", [False, True])
def test_ranges_longer_than_a_slice_arrive_whole(rows, checksum):
    source = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)
    target, expected = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    for to, at, length in rows:
        expected[to : to + length] = source[at : at + length]
    copy(columns(target, source, rows), checksum=checksum)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("length", [50, 5000])
def test_bytes_that_change_meanwhile_are_noticed(length):
    class Disturbed(Mapped):
        def copy_summed(self, targets, sources, lengths, threads, stop):
            sums = super().copy_summed(targets, sources, lengths, threads, stop)
            source[length - 1] ^= 1
            return sums

    source, target = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    with pytest.raises(ChecksumMismatch, match="somebody writes there"):
        copy(columns(target, source, [(0, 0, length)]), checksum=True, reach=Disturbed())


async def test_a_cancellation_waits_until_the_thread_has_let_go():
    began, may_end = threading.Event(), threading.Event()
    ended = []

    def work(stop):
        began.set()
        assert may_end.wait(10)
        ended.append(bool(stop[0]))

    with ThreadPoolExecutor(1) as executor:
        task = asyncio.ensure_future(on_thread(executor, work))
        await asyncio.to_thread(began.wait)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]
