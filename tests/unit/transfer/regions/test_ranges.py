import errno
import os

import numpy as np
import pytest

from penstock.core.native import native
from penstock.transfer.regions import ranges
from penstock.transfer.regions.ranges import (
    ProcessMemoryError,
    check_bounds,
    copy_ranges,
    read_process,
    write_process,
)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def at(array: np.ndarray, *offsets: int) -> np.ndarray:
    return column(*offsets) + np.uint64(array.ctypes.data)


class TestCopyRanges:
    def test_empty_ranges_touch_no_memory(self):
        copy_ranges(column(), column(), column())
        copy_ranges(column(1, 2), column(3, 4), column(0, 0))

    @pytest.mark.parametrize(
        "wrong", [np.zeros(2, np.int64), np.zeros((2, 1), np.uint64), np.zeros(4, np.uint64)[::2]]
    )
    def test_other_arrays_are_refused(self, wrong):
        with pytest.raises(TypeError):
            copy_ranges(wrong, column(0, 0), column(0, 0))


@pytest.fixture(params=["native", "python"])
def implementation(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(ranges, "native", None)
    elif native is None:
        pytest.skip("installed with PENSTOCK_NATIVE=OFF")


@pytest.mark.usefixtures("implementation")
class TestProcessMemory:
    def test_memory_that_is_not_there_says_how_far_it_came(self):
        theirs, ours = random_bytes(8192), np.zeros(8192, np.uint8)
        with pytest.raises(ProcessMemoryError, match=f"{os.getpid()}.*after 8000 bytes") as caught:
            read_process(os.getpid(), at(ours, 0, 0), np.append(at(theirs, 0), column(8)), column(8000, 100))
        assert caught.value.errno == errno.EFAULT
        assert caught.value.moved_bytes == 8000
        np.testing.assert_array_equal(ours[:8000], theirs[:8000])

    def test_nobody_has_that_pid(self):
        ours = np.zeros(10, np.uint8)
        for move in (read_process, write_process):
            with pytest.raises(OSError, match="No such process") as caught:
                move(2**22 + 1, at(ours, 0), at(ours, 0), column(10))
            assert caught.value.errno == errno.ESRCH


class TestCheckBounds:
    @pytest.mark.parametrize(
        ("offset", "length", "inside"),
        [
            (0, 100, True),
            (99, 1, True),
            (100, 0, True),
            (101, 0, False),
            (0, 101, False),
            (1, 100, False),
            (2**64 - 1, 1, False),
            (2**64 - 1, 2, False),
            (1, 2**64 - 1, False),
            (2**64 - 50, 100, False),
        ],
    )
    def test_one_range(self, offset, length, inside):
        assert check_bounds(column(offset), column(length), 100) == (-1 if inside else 0)

    def test_the_first_one_outside_is_named(self):
        assert check_bounds(column(0, 5, 200, 300), column(5, 95, 1, 1), 100) == 2
