"""A slot file on a disk that loses power: of what was not synced any sectors are kept. No wrong block is ever served.

Sectors of 512 bytes are written as a whole or not at all, in any order; that is what disks promise.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.errors import TransferError
from penstock.kv.disk.slot_file import SlotFile
from penstock.transfer.storage.slots import SUFFIX
from tests.support.slots import NAMESPACE, chain, content, targets

SECTOR = 512
BLOCK_BYTES = 4096
SLOTS = 5
CHAINS = [chain(4, first) for first in range(1, 4)]


class SimulatedDisk:
    """Passes on reads and writes, and notes each sector that was written."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int, bytes]] = []
        self.fail_after: int | None = None

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.fail_after is not None:
            if self.fail_after == 0:
                raise OSError(5, "planted")
            self.fail_after -= 1
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        done = os.pwritev(fd, buffers, offset)
        start, end = offset // SECTOR * SECTOR, -(-(offset + done) // SECTOR) * SECTOR
        with Path(path).open("rb") as file:  # the page cache shows what O_DIRECT wrote
            file.seek(start)
            data = file.read(end - start)
        self.written += [(path, start + at, data[at : at + SECTOR]) for at in range(0, end - start, SECTOR)]
        return done


class SlotFileMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp())
        self.life = 0
        self.disk = SimulatedDisk()
        self.slots = self._open()
        self._sync()
        self.stored: set[bytes] = set()

    def _path(self) -> Path:
        return self.directory / f"kv{self.life}"

    def _open(self) -> SlotFile:
        size = SLOTS * BLOCK_BYTES
        return SlotFile(self._path(), size, BLOCK_BYTES, NAMESPACE, threads=1, disk=self.disk)

    def _sync(self) -> None:
        """Keep all that was written for good."""
        self.disk.written.clear()
        for suffix in ("", SUFFIX):
            shutil.copy(f"{self._path()}{suffix}", self.directory / f"image{suffix}")

    @rule(which=st.sampled_from(CHAINS), start=st.integers(0, 3), count=st.integers(1, 4))
    def store(self, which: np.ndarray, start: int, count: int) -> None:
        hashes = which[start : start + count]
        parent = int(which[start - 1, 0]) if start else None
        self.loop.run_until_complete(self.slots.store(hashes, content(hashes, BLOCK_BYTES), parent=parent))
        self.stored |= {row.tobytes() for row in hashes}

    @rule(which=st.sampled_from(CHAINS), after=st.integers(0, 6))
    def store_until_the_disk_fails(self, which: np.ndarray, after: int) -> None:
        self.disk.fail_after = after
        try:
            self.loop.run_until_complete(self.slots.store(which, content(which, BLOCK_BYTES)))
        except TransferError:
            pass
        finally:
            self.disk.fail_after = None
        self.stored |= {row.tobytes() for row in which}

    @rule(which=st.sampled_from(CHAINS), start=st.integers(0, 3))
    def load(self, which: np.ndarray, start: int) -> None:
        assert self._loaded(which[start:]) == self.slots.locate(which[start:]), (
            "nothing is damaged while it runs"
        )

    @rule()
    def sync(self) -> None:
        self._sync()

    @rule()
    def restart(self) -> None:
        before = {row.tobytes() for hashes in CHAINS for row in hashes if self.slots.locate(row[None])}
        self.loop.run_until_complete(self.slots.close())
        self.slots = self._open()
        after = {row.tobytes() for hashes in CHAINS for row in hashes if self.slots.locate(row[None])}
        assert after >= before, "nothing that was published is lost"

    @rule(data=st.data())
    def cut_power(self, data: st.DataObject) -> None:
        kept = data.draw(
            st.lists(st.booleans(), min_size=len(self.disk.written), max_size=len(self.disk.written))
        )
        self.loop.run_until_complete(self.slots.close())
        self.life += 1
        for suffix in ("", SUFFIX):
            shutil.copy(self.directory / f"image{suffix}", f"{self._path()}{suffix}")
        for keep, (path, offset, sector) in zip(kept, self.disk.written, strict=False):
            if keep:
                suffix = SUFFIX if path.endswith(SUFFIX) else ""
                with Path(f"{self._path()}{suffix}").open("r+b") as file:
                    file.seek(offset)
                    file.write(sector)
        self.slots = self._open()
        self._sync()
        for hashes in CHAINS:
            for n in range(len(hashes)):
                self._loaded(hashes[n : n + 1])

    @invariant()
    def the_index_is_sound(self) -> None:
        self.slots.check()

    def teardown(self) -> None:
        self.loop.run_until_complete(self.slots.close())
        self.loop.close()
        shutil.rmtree(self.directory)

    def _loaded(self, hashes: np.ndarray) -> int:
        into = targets(len(hashes), BLOCK_BYTES)
        loaded = self.loop.run_until_complete(self.slots.load(hashes, into))
        assert (into[:loaded] == content(hashes[:loaded], BLOCK_BYTES)).all(), "a wrong block"
        assert {row.tobytes() for row in hashes[:loaded]} <= self.stored
        return loaded


SlotFileMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestSlotFileMachine = pytest.mark.slow(SlotFileMachine.TestCase)
