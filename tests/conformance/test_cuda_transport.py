"""Transport `cuda` on a pretended device whose memory is this process's: what is copied, pinned, shared and let go of."""

import threading
from collections import Counter
from collections.abc import Callable
from weakref import WeakValueDictionary

import numpy as np
import pytest

from penstock.core.descriptors import MemoryKind, OffsetArray, Region
from penstock.core.errors import TransferError
from penstock.testing.loop import run_async
from penstock.testing.peer_transport import PeerTransportSuite
from penstock.testing.transports.harness import Bytes, TwoAgents
from penstock.transfer import TransferOp, TransferRefused
from penstock.transfer.regions.ranges import copy_ranges
from penstock.transfer.transports.cuda.transport import CudaTransport

READ, WRITE = TransferOp.READ, TransferOp.WRITE


class PretendedCuda:
    """Devices 0 and 1."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []  # device, bytes
        self.pinned: Counter[int] = Counter()
        self.mapped: Counter[int] = Counter()
        self.joined: set[tuple[int, int]] = set()
        self.error: TransferError | None = None
        self.is_closed = False
        self._lock = threading.Lock()

    def bus_id(self, device: int) -> str:
        return f"0000:0{device}:00.0"

    def device_at(self, bus_id: str) -> int | None:
        return {"0000:00:00.0": 0, "0000:01:00.0": 1}.get(bus_id)

    def copy(self, device: int, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray) -> None:
        if self.error is not None:
            raise self.error
        copy_ranges(targets, sources, lengths)
        with self._lock:
            self.copies.append((device, int(lengths.sum())))

    def join(self, device: int, other: int) -> None:
        self.joined.add((device, other))

    def pin(self, device: int, address: int, size_bytes: int) -> None:
        self.pinned[address] += 1

    def unpin(self, device: int, address: int) -> None:
        self.pinned[address] -= 1

    def share(self, device: int, address: int) -> tuple[bytes, int]:
        return (address - 256).to_bytes(8, "little"), 256

    def map(self, device: int, handle: bytes) -> int:
        base = int.from_bytes(handle, "little")
        self.mapped[base] += 1
        return base

    def unmap(self, device: int, address: int) -> None:
        self.mapped[address] -= 1

    def close(self) -> None:
        self.is_closed = True


class Pretended(TwoAgents):
    """Device memory on both sides, or here only."""

    def __init__(self, size_bytes: int, devices: tuple[int | None, ...] = (0, 0)) -> None:
        self.cudas: list[PretendedCuda] = []
        self._devices = list(devices)
        super().__init__(lambda: [CudaTransport(self._load)], size_bytes=size_bytes)

    def _load(self) -> PretendedCuda:
        self.cudas.append(PretendedCuda())
        return self.cudas[-1]

    def make_memory(self) -> tuple[Bytes, object]:
        memory = np.zeros(self.size_bytes, np.uint8)
        device = self._devices.pop(0) if self._devices else 0
        if device is None:
            return memory, memory
        return memory, Region(
            MemoryKind.VRAM, self.size_bytes, address=memory.ctypes.data, owner=memory, device=device
        )


@pytest.mark.slow
class TestBetweenDevices(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return Pretended(size_bytes, (0, 1))


class Nobody(WeakValueDictionary[bytes, CudaTransport]):
    def get(self, key, default=None):
        return default


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have agents of this process reach each other as those of two processes do."""
    monkeypatch.setattr(CudaTransport, "by_contact", Nobody())


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
class TestBetweenProcesses(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return Pretended(size_bytes)


def play(harness: Pretended, scenario: Callable[[Pretended], object]) -> Pretended:
    async def main() -> None:
        async with harness:
            await scenario(harness)

    run_async(main())
    return harness


@pytest.mark.parametrize("op", [READ, WRITE])
def test_memory_of_the_process_is_pinned_once_and_let_go_of(op: TransferOp) -> None:
    async def scenario(harness: Pretended) -> None:
        for _ in range(2):
            await harness.agent.post(op, harness.local.ranges(), harness.remote.ranges(), harness.peer).wait()
        (reader, owner) = harness.cudas
        assert sorted([*reader.pinned.values(), *owner.pinned.values()]) == [1]
        assert {device for device, _ in reader.copies} == {1}
        await harness.owner.deregister(harness.owned)
        assert not +owner.pinned
        assert not owner.is_closed

    harness = play(Pretended(4096, (None, 1)), scenario)
    for cuda in harness.cudas:
        assert cuda.is_closed
        assert not +cuda.pinned


def test_two_devices_reach_each_other_directly() -> None:
    async def scenario(harness: Pretended) -> None:
        await harness.agent.post(READ, harness.local.ranges(), harness.remote.ranges(), harness.peer).wait()
        assert harness.cudas[0].joined == {(0, 1)}

    play(Pretended(4096, (0, 1)), scenario)


@pytest.mark.usefixtures("apart")
def test_a_region_that_is_gone_is_unmapped_and_so_is_all_in_the_end() -> None:
    async def scenario(harness: Pretended) -> None:
        await harness.agent.post(READ, harness.local.ranges(), harness.remote.ranges(), harness.peer).wait()
        reader = harness.cudas[0]
        assert sum(reader.mapped.values()) == 1
        await harness.agent.post(WRITE, harness.local.ranges(), harness.remote.ranges(), harness.peer).wait()
        assert sum(reader.mapped.values()) == 1
        await harness.agent.disconnect(harness.peer)

    harness = play(Pretended(4096), scenario)
    assert not +harness.cudas[0].mapped


@pytest.mark.usefixtures("apart")
def test_memory_of_another_process_is_refused() -> None:
    async def scenario(harness: Pretended) -> None:
        with pytest.raises(TransferRefused, match="dram of another process"):
            harness.agent.post(READ, harness.local.ranges(), harness.remote.ranges(), harness.peer)

    play(Pretended(4096, (0, None)), scenario)


@pytest.mark.usefixtures("apart")
def test_a_device_that_this_process_does_not_see_is_refused() -> None:
    async def scenario(harness: Pretended) -> None:
        with pytest.raises(TransferRefused, match="does not see"):
            harness.agent.post(READ, harness.local.ranges(), harness.remote.ranges(), harness.peer)

    play(Pretended(4096, (0, 7)), scenario)


def test_without_device_memory_it_is_of_no_use() -> None:
    async def scenario(harness: Pretended) -> None:
        with pytest.raises(TransferRefused, match="no device memory on either side"):
            harness.agent.post(READ, harness.local.ranges(), harness.remote.ranges(), harness.peer)

    play(Pretended(4096, (None, None)), scenario)


def test_what_the_driver_says_is_the_transfers_error() -> None:
    async def scenario(harness: Pretended) -> None:
        harness.cudas[0].error = TransferError("cuMemcpyAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700)")
        handle = harness.agent.post(READ, harness.local.ranges(), harness.remote.ranges(), harness.peer)
        with pytest.raises(TransferError, match="ILLEGAL_ADDRESS"):
            await handle.wait()

    play(Pretended(4096), scenario)
