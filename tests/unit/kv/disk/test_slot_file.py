"""A slot file: what was stored is loaded, after a restart too, or it is a miss."""

import os
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.kv.disk.slot_file import SlotFile
from penstock.kv.namespace import Namespace
from penstock.testing.loop import run_async
from penstock.transfer.storage.slots import SUFFIX
from tests.support.slots import BLOCK_BYTES, NAMESPACE, chain, content, targets


def make(directory: Path, slots: int = 8, block_bytes: int = BLOCK_BYTES, **options) -> SlotFile:
    slot_bytes = -(-block_bytes // 4096) * 4096
    return SlotFile(directory / "kv", slots * slot_bytes, block_bytes, NAMESPACE, **options)


async def test_buffers_may_be_scattered_and_unaligned(tmp_path: Path) -> None:
    hashes = chain(3)
    blocks = content(hashes)
    slots = make(tmp_path)
    assert await slots.store(hashes, [bytes(row) for row in blocks]) == 3
    into = [bytearray(BLOCK_BYTES) for _ in range(3)]
    assert await slots.load(hashes, into) == 3
    assert [bytes(row) for row in blocks] == into
    with pytest.raises(ValueError, match="expected 8192 contiguous writable bytes"):
        await slots.load(hashes, [bytearray(BLOCK_BYTES - 1)])
    with pytest.raises(ValueError, match="read-only: True"):
        await slots.load(hashes, [bytes(BLOCK_BYTES)])
    await slots.close()


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "other"}, {"dtype": "fp8"}, {"layout": "heads"}, {"block_size": 8}, {"salt": b"x"},
        {"adapter": "a1"},
    ],
)  # fmt: skip
async def test_another_namespace_is_refused_and_nothing_is_lost(
    tmp_path: Path, change: dict[str, object]
) -> None:
    hashes = chain(2)
    fields = {name: getattr(NAMESPACE, name) for name in NAMESPACE.__struct_fields__}
    other = Namespace(**fields | change)
    assert other.digest != NAMESPACE.digest
    slots = make(tmp_path)
    await slots.store(hashes, content(hashes))
    await slots.close()
    with pytest.raises(ConfigError, match=r"holds blocks of namespace .*5eed.* and not .* name another"):
        SlotFile(tmp_path / "kv", 8 * BLOCK_BYTES, BLOCK_BYTES, other)
    slots = make(tmp_path)
    assert slots.locate(hashes) == 2
    await slots.close()


async def test_the_salt_itself_is_not_in_the_file(tmp_path: Path) -> None:
    namespace = Namespace(
        model_digest="a", dtype="b", layout="c", block_size=4, salt=b"a secret of the tenant"
    )
    await SlotFile(tmp_path / "kv", 8 * BLOCK_BYTES, BLOCK_BYTES, namespace).close()
    assert b"secret" not in (tmp_path / f"kv{SUFFIX}").read_bytes()


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match="is no slot file"):
        make(tmp_path)
    assert (tmp_path / "kv").read_bytes() == b"somebody's"
    (tmp_path / "kv").unlink()
    (tmp_path / f"kv{SUFFIX}").write_bytes(b"notes" * 2000)
    with pytest.raises(ConfigError, match="not written by this program"):
        make(tmp_path)
    assert (tmp_path / f"kv{SUFFIX}").read_bytes() == b"notes" * 2000


def test_a_disk_that_is_full_is_refused_at_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"no space for .* are free"):
        make(tmp_path, slots=1 << 36)
    assert (tmp_path / "kv").stat().st_size == 0

    def full(fd: int, offset: int, length: int) -> None:
        if length == 8 * BLOCK_BYTES:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.transfer.storage.slots.os.posix_fallocate", full)
    with pytest.raises(ConfigError, match="no space for"):
        make(tmp_path)
    monkeypatch.undo()
    run_async(make(tmp_path).close())


async def test_without_o_direct_it_says_so_once_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.open

    def open_(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr("penstock.transfer.storage.slots.os.open", open_)
    hashes = chain(3)
    slots = make(tmp_path)
    assert not slots.is_direct
    await slots.store(hashes, content(hashes))
    into = targets(3)
    assert await slots.load(hashes, into) == 3
    assert (into == content(hashes)).all()
    await slots.close()
    assert "".join(capsys.readouterr()).count("slot_file_buffered") == 1


def test_sizes_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one slot of 8192"):
        SlotFile(tmp_path / "kv", 8191, BLOCK_BYTES, NAMESPACE)
