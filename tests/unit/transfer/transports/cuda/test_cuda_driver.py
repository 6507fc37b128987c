"""What is asked of NVIDIA's driver, in which order, on a library that only takes notes."""

from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ProtocolError, TransferError
from penstock.transfer.transports.cuda.driver import CudaDriver
from penstock.transfer.transports.cuda.frames import Ask, CudaWay, decode_frame, decode_way, encode_frame

CONTEXT, STREAM, EVENT, BASE = 0xC0, 0x50, 0xE0, 0x7000
OUTPUTS = {
    "cuDeviceGetCount": 2,
    "cuDevicePrimaryCtxRetain": CONTEXT,
    "cuStreamCreate": STREAM,
    "cuEventCreate": EVENT,
    "cuMemGetAddressRange_v2": BASE,
    "cuIpcOpenMemHandle_v2": BASE,
}
"""What is written where the first argument points to."""


class Function:
    def __init__(self, driver: "Library", name: str) -> None:
        self._driver = driver
        self.name = name
        self.argtypes: tuple[object, ...] = ()

    def __call__(self, *arguments: Any) -> int:
        self._driver.calls.append((self.name, *(getattr(each, "value", each) for each in arguments)))
        if self.name == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_MADE_UP"
        elif self.name in OUTPUTS:
            arguments[0]._obj.value = OUTPUTS[self.name]
        return self._driver.codes.get(self.name, 0)


class Library:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Function:
        function = Function(self, name)
        setattr(self, name, function)
        return function

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def driver(library: Library) -> CudaDriver:
    made = CudaDriver(lambda name: library)
    library.calls.clear()
    return made


def columns(*ranges: tuple[int, int, int]) -> list[Any]:
    return list(np.array(ranges, np.uint64).T.copy())


def test_ranges_are_queued_and_then_waited_for_asleep(library: Library, driver: CudaDriver) -> None:
    driver.copy(1, *columns((100, 200, 8), (300, 400, 16)))
    assert library.names == [
        "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate", "cuEventCreate",
        "cuMemcpyAsync", "cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize", "cuEventDestroy_v2",
    ]  # fmt: skip
    assert library.calls[5:7] == [
        ("cuMemcpyAsync", 100, 200, 8, STREAM),
        ("cuMemcpyAsync", 300, 400, 16, STREAM),
    ]
    assert library.calls[3][2] == 1, "not in step with the default stream"
    assert library.calls[4][2] == 3, "waits asleep, and takes no times"
    library.calls.clear()
    driver.copy(1, *columns((1, 2, 3)))
    assert "cuStreamCreate" not in library.names
    assert "cuDevicePrimaryCtxRetain" not in library.names


def test_a_copy_that_fails_is_told_after_what_was_queued_has_ended(
    library: Library, driver: CudaDriver
) -> None:
    library.codes["cuMemcpyAsync"] = 700
    with pytest.raises(TransferError, match=r"cuMemcpyAsync: CUDA_ERROR_MADE_UP \(700\)"):
        driver.copy(0, *columns((1, 2, 3)))
    assert library.names.index("cuEventSynchronize") < library.names.index("cuGetErrorName")


def test_device_memory_is_shared_from_where_its_allocation_begins(
    library: Library, driver: CudaDriver
) -> None:
    handle, offset = driver.share(0, BASE + 512)
    assert (len(handle), offset) == (64, 512)
    assert (library.calls[-1][0], library.calls[-1][2]) == ("cuIpcGetMemHandle", BASE)
    assert driver.map(0, handle) == BASE
    driver.unmap(0, BASE)
    assert library.calls[-1] == ("cuIpcCloseMemHandle", BASE)
    library.codes["cuIpcGetMemHandle"] = 1
    with pytest.raises(TransferError, match="expandable segments"):
        driver.share(0, BASE)
    with pytest.raises(TransferError, match="5 bytes"):
        driver.map(0, b"short")


def test_devices_are_joined_once_and_may_refuse(library: Library, driver: CudaDriver) -> None:
    library.codes["cuCtxEnablePeerAccess"] = 217
    driver.join(0, 0)
    assert library.calls == []
    driver.join(0, 1)
    driver.join(1, 0)
    assert library.names.count("cuCtxEnablePeerAccess") == 2


def test_closing_gives_back_streams_and_contexts(library: Library, driver: CudaDriver) -> None:
    driver.pin(0, 4096, 100)
    driver.unpin(0, 4096)
    driver.copy(0, *columns((1, 2, 3)))
    library.calls.clear()
    driver.close()
    driver.close()
    assert library.names == [
        "cuCtxSetCurrent", "cuStreamDestroy_v2", "cuDeviceGet", "cuDevicePrimaryCtxRelease_v2",
    ]  # fmt: skip


def test_a_device_of_another_host_is_not_found(library: Library, driver: CudaDriver) -> None:
    library.codes["cuDeviceGetByPCIBusId"] = 101
    assert driver.device_at("0000:01:00.0") is None


def test_without_a_driver_or_a_device_it_cannot_start(library: Library) -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(TransferError, match=r"no NVIDIA driver here: libcuda\.so\.1"):
        CudaDriver(load)
    library.codes["cuInit"] = 100
    with pytest.raises(TransferError, match="cuInit"):
        CudaDriver(lambda name: library)


def test_messages_survive_the_way_and_nonsense_is_refused() -> None:
    way = CudaWay(address=5, bus_id="0000:00:00.0")
    assert decode_way(encode_frame(way)) == way
    assert decode_way(b"") is None
    with pytest.raises(ProtocolError, match="peer"):
        decode_frame(b"\xc1", "peer")
    with pytest.raises(ProtocolError):
        decode_frame(encode_frame(way), "peer")
    assert Ask.__struct_config__.frozen
