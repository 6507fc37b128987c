"""What a slab refuses to open, what it keeps, and how a sick disk is reported."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ChecksumMismatch, TransferError
from penstock.transfer.storage import slab_sums
from penstock.transfer.storage.block_sums import BLOCK_BYTES
from penstock.transfer.storage.extents import Extents
from penstock.transfer.storage.io_threads import Bounce
from penstock.transfer.storage.slab import SUMS_SUFFIX, Slab
from tests.support.sick_disk import SickDisk

SIZE = 16 * BLOCK_BYTES
BOUNCE = Bounce(SIZE)


def _made(path: Path, size_bytes: int, *disk: Any) -> Slab:
    """Open a slab, and take its space as its agent does on a thread."""
    slab = Slab(path, size_bytes, *disk)
    if not slab.is_reserved:
        slab.reserve()
    return slab


def _plan(memory: np.ndarray, at: int = 0) -> Extents:
    return Extents.plan(
        *(np.array([value], np.uint64) for value in (1, at, memory.ctypes.data, memory.nbytes)),
        io_bytes=SIZE,
    )


def _write(slab: Slab, memory: np.ndarray, at: int = 0) -> None:
    slab.write(_plan(memory, at), 0, BOUNCE)


def _read(slab: Slab, size: int, at: int = 0, *, checksum: bool = True) -> bytes:
    memory = np.full(size, 9, np.uint8)
    slab.read(_plan(memory, at), 0, BOUNCE, checksum=checksum)
    return memory.tobytes()


def test_where_the_kernel_names_no_boot_only_what_was_closed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slab_sums, "_BOOT_ID", tmp_path / "none")
    slab = _made(tmp_path / "kv", SIZE)
    _write(slab, np.full(SIZE, 3, np.uint8))
    for copy in ("kv", f"kv{SUMS_SUFFIX}"):
        shutil.copy(tmp_path / copy, tmp_path / copy.replace("kv", "crashed"))
    slab.close()
    closed, crashed = _made(tmp_path / "kv", SIZE), _made(tmp_path / "crashed", SIZE)
    assert _read(closed, 1) == bytes([3])
    with pytest.raises(ChecksumMismatch, match="never written, or not since the slab was made or forgotten"):
        _read(crashed, 1)
    assert "slab_forgotten" in capsys.readouterr().out
    closed.close()
    crashed.close()


def test_a_file_that_is_no_slab_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter").write_bytes(b"dear")
    with pytest.raises(TransferError, match="letter exists and is no slab"):
        _made(tmp_path / "letter", SIZE)
    assert (tmp_path / "letter").read_bytes() == b"dear"
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_another_size_or_a_damaged_file_of_checksums_is_refused(tmp_path: Path) -> None:
    _made(tmp_path / "kv", SIZE).close()
    with pytest.raises(TransferError, match=f"is of a slab of {SIZE} bytes .* not of {2 * SIZE}"):
        _made(tmp_path / "kv", 2 * SIZE)
    os.truncate(tmp_path / "kv", SIZE // 2)
    with pytest.raises(TransferError, match=f"kv has {SIZE // 2} bytes, and not {SIZE}"):
        _made(tmp_path / "kv", SIZE)
    (tmp_path / f"kv{SUMS_SUFFIX}").write_bytes(b"nonsense")
    with pytest.raises(TransferError, match=r"kv.crc32c is damaged, or of another version; delete it"):
        _made(tmp_path / "kv", SIZE)


@pytest.mark.parametrize("path", [".", "missing/kv"])
def test_where_no_file_can_be(tmp_path: Path, path: str) -> None:
    with pytest.raises(TransferError, match=r"cannot be opened as a slab: .* \(errno \d+\)"):
        _made(tmp_path / path, SIZE)


def test_no_space(tmp_path: Path) -> None:
    size = 1 << 43  # more than any disk that runs this, and less than a file may have
    with pytest.raises(TransferError, match=rf"kv: no space for {size} bytes, \d+ are free"):
        _made(tmp_path / "kv", size)
    assert (tmp_path / "kv").stat().st_size == 0


def test_a_disk_that_fails_or_ends_early_is_named_with_numbers(tmp_path: Path) -> None:
    disk = SickDisk()
    slab = _made(tmp_path / "kv", SIZE, disk)
    _write(slab, np.zeros(SIZE, np.uint8))
    disk.errors["pwritev"] = errno.ENOSPC
    with pytest.raises(
        TransferError, match=r"kv: writing 8192 bytes at 4096 failed: no space left .*errno 28"
    ):
        _write(slab, np.zeros(2 * BLOCK_BYTES, np.uint8), at=BLOCK_BYTES)
    disk.errors["preadv"] = errno.EIO
    with pytest.raises(TransferError, match="kv: reading 4096 bytes at 0 failed: input/output error"):
        _read(slab, 100)
    disk.errors.clear()
    os.truncate(tmp_path / "kv", 0)
    with pytest.raises(TransferError, match="nothing moved; was the file cut off"):
        _read(slab, 100)
    slab.close()


def test_a_file_system_without_direct_io_is_said_and_synced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = SickDisk()
    disk.errors["preadv"] = errno.EINVAL
    slab = _made(tmp_path / "kv", SIZE, disk)
    assert not slab.is_direct
    assert "slab_buffered" in capsys.readouterr().out
    disk.errors = {"fdatasync": errno.EIO}
    _write(slab, np.full(SIZE, 4, np.uint8))
    with pytest.raises(TransferError, match="kv: flushing failed: input/output error"):
        slab.sync()
    slab.close()
    assert "slab_sync_failed" in capsys.readouterr().out
