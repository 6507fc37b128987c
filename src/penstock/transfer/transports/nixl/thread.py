"""A NIXL agent and the one thread that calls it. The thread sleeps while no request is running.

NIXL's progress thread runs too; without it an idle peer never answers. NIXL's Python API sets its delay to 0, which spins. An
idle progress thread takes 1.5 % of a core with 500 us and 0.3 % with 10 ms. Transfers are as fast with 10 ms, since only
events that UCX does not report wait for the delay (measured, 2 cores of an AMD EPYC, NIXL 1.5.1).
"""

import asyncio
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import queue
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PeerLost, PenstockError, TransferError
from penstock.core.log import get_logger

_log = get_logger()
_MODULES = ("nixl_cu13", "nixl_cu12")
_PROGRESS_DELAY_US = 10_000
_REQUESTS_AT_ONCE = 2
NONCE_BYTES = 8
_WAIT_S_MIN, _WAIT_S_MAX = 20e-6, 500e-6
_WAIT_ABANDONED_S = 0.02
"""Seconds between two polls of abandoned requests."""

Done = TypeVar("Done")
Rows = NDArray[np.uint64]


def row(address: int, size_bytes: int, device: int = 0) -> Rows:
    """Give the (1, 3) row of one range."""
    return np.array([[address, size_bytes, device]], np.uint64)


def find_modules() -> list[str]:
    """Find NIXL's installed modules, that of the CUDA of this process's PyTorch first.

    Raises:
        TransferError: none is.
    """
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    found = [module for module in _MODULES if importlib.util.find_spec(module) is not None]
    if not found:
        raise TransferError(
            "NIXL is not installed: pip install --no-deps nixl-cu12==1.5.1 (339 MB, needs only numpy)"
        )
    return sorted(found, key=lambda module: not module.endswith(cuda.partition(".")[0]))


def load_bindings(modules: Callable[[], Sequence[str]] = find_modules) -> Any:
    """Import NIXL's bindings of the first module that can be imported here, which takes about 0.3 s.

    Raises:
        TransferError: none can be.
    """
    failed = []
    for module in modules():
        try:
            bindings = importlib.import_module(f"{module}._bindings")
        except ImportError as error:
            failed.append(f"{module} is installed and cannot be imported: {error}")
        else:
            _end_without_unloading()
            return bindings
    raise TransferError("; ".join(failed))


def use_device(device: int) -> None:
    """Make the primary context of a CUDA device the current one of this thread. Without CUDA's driver there is none.

    Raises:
        TransferError: CUDA refuses.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    number, context = ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(number), device)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), number)),  # the process keeps it
        ("cuCtxSetCurrent", (context,)),
    ):
        if code := getattr(cuda, name)(*arguments):
            raise TransferError(f"CUDA device {device}: {name} fails with CUDA's error {code}")


@functools.cache
def _end_without_unloading() -> None:
    """Keep the exit status of this process.

    If the system has RDMA libraries too, NIXL's copies crash when they are unloaded, so every process with an agent ended by
    SIGSEGV (libnl-route in nixl-cu12 1.5.1, Debian 12 with libnl-route-3-200). `_exit` unloads nothing; it runs after Python
    has ended and flushed its files.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc
        libc.on_exit(libc._exit, None)


@dataclass(slots=True, eq=False)
class Handles:
    """NIXL's handles of one prepared list. The thread owns them."""

    requests: list[int] = field(default_factory=list)
    lists: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A list of ranges to prepare.

    Attributes:
        op: NIXL's name.
        peer: NIXL's name of the other agent.
        kinds: NIXL's memory kinds, local and remote.
        sides: (n, 3) address, length, device; local and remote.
        parts: (first, end) rows of each request.
    """

    op: str
    peer: str
    kinds: tuple[str, str]
    sides: tuple[Rows, Rows]
    parts: list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Flight:
    """The requests of one run, posted a few at a time. `ended` is done when none is running any more.

    `cleanup` frees their resources; only an abandoned flight has one.
    """

    handles: Handles
    waiting: deque[int]
    ended: "asyncio.Future[None]"
    under_way: list[int] = field(default_factory=list)
    error: PenstockError | None = None
    cleanup: Callable[[], object] | None = None


class NixlThread:
    """Calls one NIXL agent. One event loop calls the methods, except those marked as the thread's."""

    def __init__(
        self, name: str, bindings: Callable[[], Any], use_device: Callable[[int], None] = use_device
    ) -> None:
        """Start the thread; `open` makes the agent.

        Args:
            name: of the NIXL agent, unique among agents that connect to each other.
            bindings: imports NIXL's bindings, in the thread.
            use_device: makes a device's context the thread's, before memory of the device is registered.
        """
        self.name = name
        self._use_device = use_device
        self._import = bindings
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._flights: list[Flight] = []
        self._handles: set[Handles] = set()
        self._stubborn: list[int] = []  # requests that NIXL did not let go of yet
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.nixl: Any = None
        self.agent: Any = None
        self.backend = 0
        self.nonce = np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)
        """Peers read it to test the connection."""
        self.probe: Any = None
        threading.Thread(target=self._run, name="transfer-nixl", daemon=True).start()

    async def open(self) -> None:
        """Make the agent.

        Raises:
            TransferError: NIXL does not work here.
        """
        await self.call(self._open)

    async def close(self) -> None:
        """Release everything; running requests end as if cancelled. Safe twice."""
        if not self._is_closing:
            self._is_closing = True
            self._work.put(None)
        await asyncio.shield(self._ended)

    def submit(self, work: Callable[[], object]) -> None:
        """Run a function on the thread without waiting for it."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the thread goes on
                _log.warning("nixl_call_failed", agent=self.name, error=f"{type(error).__name__}: {error}")

        self._work.put(guarded)

    async def call(self, work: Callable[[], Done]) -> Done:
        """Run a function on the thread and return its result.

        Raises:
            TransferError: it failed.
        """
        self._check_open()
        answer: asyncio.Future[Done] = self._loop.create_future()

        def guarded() -> None:
            try:
                self._tell(answer, work(), None)
            except Exception as error:  # noqa: BLE001 - whoever waits hears of it
                self._tell(answer, None, self.worded(error))

        self._work.put(guarded)
        return await answer

    def fly(self, handles: Handles) -> Flight:
        """Post all requests of a list, which must not be running.

        Raises:
            TransferError: the agent closes.
        """
        self._check_open()
        flight = Flight(handles, deque(handles.requests), self._loop.create_future())
        flight.ended.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # it may be nobody's
        self._work.put(lambda: self._flights.append(flight))
        return flight

    def stop(self, flight: Flight) -> None:
        """Post no more of its requests. Posted ones run to their end, since UCX cannot cancel them."""
        self._work.put(flight.waiting.clear)

    def abandon(self, flight: Flight, cleanup: Callable[[], object] | None = None) -> None:
        """Post no more of its requests, and free its handles once none is running; the caller must not use them any more.

        NIXL cannot cancel a request: after a release or an invalidation its bytes still arrive when a stopped peer continues
        (measured, UCX over TCP).

        Args:
            flight: which.
            cleanup: called by the thread then.
        """

        def leave() -> None:
            flight.waiting.clear()
            flight.cleanup = cleanup or (lambda: None)
            if flight not in self._flights:
                self._clean_up(flight)

        self._work.put(leave)

    def discard(self, handles: Handles) -> None:
        """Free the handles of a list, after its running flight if there is one. Any thread may call it, finalisers too."""

        def free() -> None:
            if all(flight.handles is not handles for flight in self._flights):
                self._free(handles)

        self._work.put(free)

    def _check_open(self) -> None:
        if self._is_closing:
            raise TransferError(f"nixl of agent {self.name} is closed")

    # -- in the thread --------------------------------------------------------------------------------------------

    def register(self, rows: Rows, kind: str) -> Any:
        """Register (1, 3) address, length, device; returns NIXL's list for `deregister`. The thread's."""
        if kind == "VRAM":  # UCX registers it in the thread's current context
            self._use_device(int(rows[0, 2]))
        described = self.nixl.nixlRegDList(self._kind(kind), rows)
        self.agent.registerMem(described, [self.backend])
        return described

    def deregister(self, described: Any) -> None:
        """Forget what was registered; the thread's."""
        self.agent.deregisterMem(described, [self.backend])

    def forget_agent(self, name: str) -> None:
        """Forget another agent; the thread's."""
        self.agent.invalidateRemoteMD(name)

    def export(self, described: list[Any], *, has_agent: bool = False) -> bytes:
        """Give NIXL's metadata of registered memory of one kind, with that of the agent if `has_agent`. The thread's."""
        if len({each.getType() for each in described}) > 1:
            raise TransferError("regions of both dram and vram; ask for one kind at a time")
        joined = self.nixl.nixlRegDList(described[0].getType())
        for each in described:
            joined.append(each[0])
        metadata: bytes = self.agent.getLocalPartialMD(joined, has_agent, [self.backend])
        return metadata

    def make_ready(self, handles: Handles, plan: Plan) -> None:
        """Have NIXL check both sides' ranges and prepare a request for each part. The thread's."""
        if handles.requests:
            return
        self._free(handles)  # what a failed try left
        self._handles.add(handles)
        for owner, kind, rows in zip(
            (self.nixl.NIXL_INIT_AGENT, plan.peer), plan.kinds, plan.sides, strict=True
        ):
            ranges = self.nixl.nixlXferDList(self._kind(kind), rows)
            handles.lists.append(self.agent.prepXferDlist(owner, ranges, [self.backend]))
        here, there = handles.lists
        op = getattr(self.nixl, f"NIXL_{plan.op}")
        for first, end in plan.parts:
            rows = np.arange(first, end, dtype=np.int32)
            handles.requests.append(self.agent.makeXferReq(op, here, rows, there, rows, "", [self.backend]))

    def worded(self, error: Exception) -> PenstockError:
        """Translate one of NIXL's errors."""
        if isinstance(error, PenstockError):
            return error
        text = f"nixl: {type(error).__name__}: {error}"
        return PeerLost(text) if "Disconnect" in type(error).__name__ else TransferError(text)

    def _kind(self, name: str) -> Any:
        return getattr(self.nixl, f"{name}_SEG")

    def _open(self) -> None:
        self.nixl = self._import()
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        self.agent = self.nixl.nixlAgent(self.name, config)
        self.backend = self.agent.createBackend("UCX", {})
        self.probe = self.register(row(self.nonce.ctypes.data, self.nonce.nbytes), "DRAM")

    def _run(self) -> None:
        wait_s: float | None = None
        while True:
            try:
                work = self._work.get(timeout=wait_s) if wait_s != 0 else self._work.get_nowait()
            except queue.Empty:
                pass
            else:
                if work is None:
                    break
                work()
            has_moved = False
            for flight in self._flights:
                has_moved |= self._step(flight)
            self._land()
            if not self._flights:
                wait_s = None
            elif has_moved:
                wait_s = 0
            elif all(flight.cleanup is not None for flight in self._flights):
                wait_s = _WAIT_ABANDONED_S
            else:
                wait_s = min(2 * wait_s, _WAIT_S_MAX) if wait_s else _WAIT_S_MIN
        self._shut()

    def _step(self, flight: Flight) -> bool:
        """Post one more request if allowed, poll running ones, and return whether anything changed.

        `postXferReq` itself copies memory of the same host, so each step posts one request and flights take turns.
        """
        before = len(flight.waiting), len(flight.under_way)
        try:
            if flight.waiting and len(flight.under_way) < _REQUESTS_AT_ONCE:
                request = flight.waiting.popleft()
                if self.agent.postXferReq(request) == self.nixl.NIXL_IN_PROG:
                    flight.under_way.append(request)
        except Exception as error:  # noqa: BLE001 - it is the transfer's
            self._fail(flight, error)
        for request in list(flight.under_way):
            try:
                is_done = self.agent.getXferStatus(request) != self.nixl.NIXL_IN_PROG
            except Exception as error:  # noqa: BLE001 - it is the transfer's
                self._fail(flight, error)
                is_done = True
            if is_done:
                flight.under_way.remove(request)
        return before != (len(flight.waiting), len(flight.under_way))

    def _fail(self, flight: Flight, error: Exception) -> None:
        flight.error = flight.error or self.worded(error)
        flight.waiting.clear()

    def _land(self) -> None:
        """Report flights that have ended."""
        ended = [flight for flight in self._flights if not flight.waiting and not flight.under_way]
        if ended:
            self._flights = [flight for flight in self._flights if flight.waiting or flight.under_way]
            for flight in ended:
                if flight.cleanup is not None:
                    self._clean_up(flight)
                self._tell(flight.ended, None, flight.error)

    def _clean_up(self, flight: Flight) -> None:
        self._free(flight.handles)
        try:
            if flight.cleanup is not None:
                flight.cleanup()
        except Exception as error:  # noqa: BLE001 - the thread goes on
            _log.warning("nixl_call_failed", agent=self.name, error=f"{type(error).__name__}: {error}")

    def _release(self, requests: list[int]) -> None:
        pending, self._stubborn = [*self._stubborn, *requests], []
        for request in pending:
            try:
                self.agent.releaseXferReq(request)
            except Exception:  # noqa: BLE001 - it is still under way: the next release tries again
                self._stubborn.append(request)

    def _free(self, handles: Handles) -> None:
        self._handles.discard(handles)
        self._release(handles.requests)
        for prepared in handles.lists:
            with contextlib.suppress(Exception):
                self.agent.releasedDlistH(prepared)
        handles.requests, handles.lists = [], []

    def _shut(self) -> None:
        for flight in self._flights:
            self._tell(flight.ended, None, TransferError("the agent closes"))
        for handles in list(self._handles):
            self._free(handles)
        self._release([])
        self.agent = self.nixl = None
        while not self._work.empty():  # who asked before the end hears of it
            work = self._work.get()
            if work is not None:
                with contextlib.suppress(Exception):
                    work()
        self._tell(self._ended, None, None)

    def _tell(self, future: "asyncio.Future[Any]", result: object, error: PenstockError | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(settle)
