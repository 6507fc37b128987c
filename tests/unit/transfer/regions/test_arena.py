import errno
import fcntl
import os
import tempfile

import numpy as np
import pytest

from penstock.core.errors import TransferError, TransferRefused
from penstock.transfer.regions import arena as arena_module
from penstock.transfer.regions.arena import Arena

PAGE = os.sysconf("SC_PAGESIZE")


def test_a_reader_needs_no_right_to_write():
    with Arena.create(PAGE) as mine:
        fd = os.open(f"/proc/self/fd/{mine.fd}", os.O_RDONLY)
        with Arena.map(fd, PAGE, writable=False) as theirs:
            mine.array[5] = 1
            assert theirs.array[5] == 1
            assert not theirs.array.flags.writeable


def test_nobody_can_cut_it_off():
    with Arena.create(PAGE) as mine:
        for size in (0, PAGE - 1, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(mine.fd, size)


def _loose_memory():
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    return fd


def _file():
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        return os.dup(file.fileno())


def _pipe():
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize("make", [_loose_memory, _file, _pipe])
def test_what_can_shrink_is_refused_and_closed(make):
    fd = make()
    with pytest.raises(TransferRefused):
        Arena.map(fd, PAGE)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.parametrize("claimed", [0, PAGE + 1, 2**62])
def test_a_size_that_is_not_there_is_refused(claimed):
    with Arena.create(PAGE) as mine, pytest.raises(TransferRefused, match=f"{PAGE} bytes .* {claimed}"):
        Arena.map(os.dup(mine.fd), claimed)


def test_more_than_there_is_is_refused():
    with pytest.raises(TransferError, match="make it smaller"):
        Arena.create(2**62, prefault=False)
    with pytest.raises(ValueError, match="size_bytes"):
        Arena.create(0)


def test_an_array_outlives_the_arena():
    arena = Arena.create(PAGE)
    part = arena.array[10:20]
    fd = arena.fd
    arena.close()
    arena.close()
    part[:] = 3
    assert part.sum() == 30
    with pytest.raises(OSError, match="Bad file"):
        fcntl.fcntl(fd, fcntl.F_GETFD)
    with pytest.raises(TransferError, match="closed"):
        _ = arena.fd
    assert arena.array.size == 0
    np.testing.assert_array_equal(part, 3)


def test_one_that_nobody_closed_is_closed_with_its_last_reference():
    arena = Arena.create(PAGE)
    fd = arena.fd
    del arena
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_memory_knows_its_arena():
    with Arena.create(4 * PAGE) as arena, Arena.create(PAGE) as other:
        part = arena.array[100:200]
        assert Arena.around(part.ctypes.data, part.nbytes) is arena
        assert Arena.around(other.address, PAGE) is other
        assert Arena.around(arena.address, 4 * PAGE + 1) is None
        assert Arena.around(np.zeros(10, np.uint8).ctypes.data, 10) is None
        address = arena.address
    assert Arena.around(address, 10) is None


def test_touching_takes_every_page_and_a_host_without_that_memory_is_said(monkeypatch):
    with Arena.create(10 * PAGE + 7, prefault=False) as mine:
        assert os.fstat(mine.fd).st_blocks == 0
        mine.touch()
        assert os.fstat(mine.fd).st_blocks * 512 == 11 * PAGE
        monkeypatch.setattr(arena_module, "_advise", lambda *_: errno.ENOMEM)
        with pytest.raises(OSError, match="Cannot allocate"):
            mine.touch()
        with pytest.raises(TransferError, match="make it smaller"):
            Arena.create(PAGE)
