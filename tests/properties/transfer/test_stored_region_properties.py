"""Regions of a file and of an object store against a byte array: any writes, any reads, by one agent and then by another."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.descriptors import Region
from penstock.core.errors import ChecksumMismatch
from penstock.testing.loop import run_async
from penstock.transfer import FileRegion, ObjectRegion, TransferAgent, TransferConfig, TransferOp
from penstock.transfer.storage.file import FileStorage
from penstock.transfer.storage.object import ObjectStorage

obstore = pytest.importorskip("obstore")

BLOCK_BYTES, OBJECT_BYTES = 4096, 1 << 20
SIZE = 2 * OBJECT_BYTES + 3 * BLOCK_BYTES

edges = st.sampled_from([0, BLOCK_BYTES, OBJECT_BYTES, 2 * OBJECT_BYTES, SIZE])
places = st.builds(lambda edge, by: min(max(edge + by, 0), SIZE), edges, st.integers(-9000, 9000))
cuts = st.lists(st.one_of(edges, places), min_size=2, max_size=6, unique=True).map(sorted)
ranges = cuts.map(lambda points: list(zip(points[::2], points[1::2], strict=False)))
steps = st.one_of(
    st.tuples(st.just("write"), ranges, st.integers(0, 255)),
    st.tuples(st.just("read"), ranges, st.just(0)),
    st.tuples(st.just("reopen"), st.just([]), st.just(0)),
)


class _Model:
    def __init__(self, block_bytes: int) -> None:
        self.data = np.zeros(SIZE, np.uint8)
        self.written = np.zeros(SIZE // block_bytes, bool)
        self._block_bytes = block_bytes

    def blocks(self, start: int, end: int) -> slice:
        return slice(start // self._block_bytes, -(-end // self._block_bytes))


def _in_store() -> Callable[[], Region]:
    store = obstore.store.MemoryStore()
    return lambda: ObjectRegion(store, SIZE, object_bytes=OBJECT_BYTES, block_bytes=BLOCK_BYTES)


@pytest.mark.slow
@given(st.lists(steps, max_size=10))
@settings(max_examples=25)
def test_what_is_read_is_what_was_written(script: list[tuple[str, list[tuple[int, int]], int]]) -> None:
    _compare(_in_store(), BLOCK_BYTES, script)


@pytest.mark.slow
@given(st.lists(steps, max_size=10), st.sampled_from([BLOCK_BYTES, 5 * BLOCK_BYTES]))
@settings(max_examples=25)
def test_what_is_read_of_a_file_is_what_was_written(
    script: list[tuple[str, list[tuple[int, int]], int]], block_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kv"
        _compare(lambda: FileRegion(path, SIZE, block_bytes=block_bytes), block_bytes, script)


def _compare(
    region: Callable[[], Region], block_bytes: int, script: list[tuple[str, list[tuple[int, int]], int]]
) -> None:
    model = _Model(block_bytes)
    memory = np.zeros(SIZE, np.uint8)

    async def main() -> None:
        turns = iter(script)
        while await _life(region(), memory, model, turns):
            pass

    run_async(main())


async def _life(region: Region, memory: np.ndarray, model: _Model, turns: Any) -> bool:
    """Do what one agent does; says whether there is more for another one."""
    transports = [ObjectStorage(requests=3, request_timeout_s=10, retries=0), FileStorage(threads=3)]
    async with TransferAgent("a", TransferConfig(listen=()), transports=transports) as agent:
        local = agent.register(memory)
        remote = agent.register(region)
        for what, spans, seed in turns:
            if what == "reopen":
                return True
            starts, lengths = [a for a, _ in spans], [b - a for a, b in spans]
            lists = local.ranges(starts, lengths), remote.ranges(starts, lengths)
            if what == "write":
                memory[:] = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
                await agent.post(TransferOp.WRITE, *lists).wait()
                for start, end in spans:
                    model.data[start:end] = memory[start:end]
                    model.written[model.blocks(start, end)] = True
                continue
            memory[:] = 0
            known = all(model.written[model.blocks(start, end)].all() for start, end in spans)
            try:
                await agent.post(TransferOp.READ, *lists).wait()
            except ChecksumMismatch:
                assert not known
                continue
            assert known
            for start, end in spans:
                assert np.array_equal(memory[start:end], model.data[start:end])
    return False
