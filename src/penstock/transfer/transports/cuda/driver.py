"""NVIDIA's driver, as far as transfers need it: copies that a thread waits for asleep, pinned memory, shared memory.

It is called by way of ctypes: libcuda.so.1 comes with every driver and its functions stay as they are, whatever
runtime PyTorch brought along, whose primary context it uses.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable
from itertools import repeat
from typing import Any, Protocol

from penstock.core.descriptors import OffsetArray
from penstock.core.errors import TransferError

_HANDLE_BYTES = 64
_BUS_ID_BYTES = 32
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING = 1, 2
_HOST_REGISTER_PORTABLE = 1
_IPC_LAZY_ENABLE_PEER_ACCESS = 1


class Cuda(Protocol):
    """A process's devices. Each method raises TransferError.

    Those that say nothing else may block and make a device the calling thread's, so they are for threads of our own:
    in the user's they would change which device PyTorch takes for the current one.
    """

    def bus_id(self, device: int) -> str:
        """Name a device so that other processes know it. From any thread."""
        ...

    def device_at(self, bus_id: str) -> int | None:
        """Find a device; None if this process does not see it. From any thread."""
        ...

    def copy(self, device: int, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray) -> None:
        """Copy ranges between any memory that this process reaches, on a stream of this device, and wait for the end."""
        ...

    def join(self, device: int, other: int) -> None:
        """Have two devices reach each other's memory directly, if they can."""
        ...

    def pin(self, device: int, address: int, size_bytes: int) -> None:
        """Keep memory of this process where it is, so that this device and all others read and write it directly."""
        ...

    def unpin(self, device: int, address: int) -> None: ...

    def share(self, device: int, address: int) -> tuple[bytes, int]:
        """Give what another process needs to reach device memory: a handle, and where in it the address is."""
        ...

    def map(self, device: int, handle: bytes) -> int:
        """Reach what another process shares: the address here."""
        ...

    def unmap(self, device: int, address: int) -> None: ...

    def close(self) -> None: ...


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaDriver:
    """The real one."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """Load it; no context is made before a device is used.

        Args:
            load: opens a library.

        Raises:
            TransferError: there is no driver, or no device.
        """
        try:
            self._library = load("libcuda.so.1")
        except OSError as error:
            raise TransferError(f"no NVIDIA driver here: {error}") from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._streams: dict[tuple[int, int], ctypes.c_void_p] = {}  # by device and thread
        self._joined: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._memcpy = self._library.cuMemcpyAsync
        self._memcpy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._call("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            raise TransferError("the NVIDIA driver sees no device; CUDA_VISIBLE_DEVICES may hide them")

    def bus_id(self, device: int) -> str:
        name = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self._call("cuDeviceGetPCIBusId", name, ctypes.c_int(_BUS_ID_BYTES), self._device(device))
        return name.value.decode()

    def device_at(self, bus_id: str) -> int | None:
        found = ctypes.c_int()
        with contextlib.suppress(TransferError):
            self._call("cuDeviceGetByPCIBusId", ctypes.byref(found), ctypes.c_char_p(bus_id.encode()))
            return found.value
        return None

    def copy(self, device: int, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray) -> None:
        self._enter(device)
        stream = self._stream(device)
        done = ctypes.c_void_p()
        self._call(
            "cuEventCreate", ctypes.byref(done), ctypes.c_uint(_EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)
        )
        try:
            columns = targets.tolist(), sources.tolist(), lengths.tolist()
            codes = set(map(self._memcpy, *columns, repeat(stream)))
            self._call("cuEventRecord", done, stream)
            self._call("cuEventSynchronize", done)
        finally:
            self._call("cuEventDestroy_v2", done)
        for code in codes - {0}:
            raise self._error("cuMemcpyAsync", code)

    def join(self, device: int, other: int) -> None:
        with self._lock:
            if device == other or (device, other) in self._joined:
                return
            self._joined.update({(device, other), (other, device)})
        for one, two in ((device, other), (other, device)):
            there = self._context(two)
            self._enter(one)
            with contextlib.suppress(TransferError):  # without it copies go by way of the host
                self._call("cuCtxEnablePeerAccess", there, ctypes.c_uint(0))

    def pin(self, device: int, address: int, size_bytes: int) -> None:
        self._enter(device)
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(size_bytes),
            ctypes.c_uint(_HOST_REGISTER_PORTABLE),
        )

    def unpin(self, device: int, address: int) -> None:
        self._enter(device)
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def share(self, device: int, address: int) -> tuple[bytes, int]:
        self._enter(device)
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        pointer = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        try:
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except TransferError as error:
            raise TransferError(
                f"device memory cannot be shared with another process: {error.message}; PyTorch's expandable segments"
                " cannot be: allocate without them"
            ) from error
        return bytes(handle.data), address - base.value

    def map(self, device: int, handle: bytes) -> int:
        if len(handle) != _HANDLE_BYTES:
            raise TransferError(
                f"a handle of {len(handle)} bytes for device memory, expected {_HANDLE_BYTES}"
            )
        self._enter(device)
        base = ctypes.c_uint64()
        value = _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(_IPC_LAZY_ENABLE_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), value, flags)
        return base.value

    def unmap(self, device: int, address: int) -> None:
        self._enter(device)
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def close(self) -> None:
        with self._lock:
            streams, self._streams = self._streams, {}
            contexts, self._contexts = self._contexts, {}
        for (device, _), stream in streams.items():
            self._call("cuCtxSetCurrent", contexts[device])
            self._call("cuStreamDestroy_v2", stream)
        for device in contexts:
            self._call("cuDevicePrimaryCtxRelease_v2", self._device(device))

    def _device(self, device: int) -> ctypes.c_int:
        found = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(device))
        return found

    def _context(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
                self._contexts[device] = context
            return context

    def _enter(self, device: int) -> None:
        """Make a device the calling thread's."""
        self._call("cuCtxSetCurrent", self._context(device))

    def _stream(self, device: int) -> ctypes.c_void_p:
        """Give the calling thread's stream on the device that it has entered."""
        key = device, threading.get_ident()
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                stream = ctypes.c_void_p()
                self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_STREAM_NON_BLOCKING))
                self._streams[key] = stream
            return stream

    def _call(self, name: str, *arguments: object) -> None:
        code: int = getattr(self._library, name)(*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> TransferError:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value
        return TransferError(f"{name}: {known.decode() if known else 'error'} ({code})")
