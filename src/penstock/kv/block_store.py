"""A store of KV blocks by their hash behind a circuit breaker: what it is told, and how its failures become misses."""

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DeadlineExceeded, TransferError
from penstock.core.log import get_logger
from penstock.core.wire import HashArray, Wire

DIGEST_BYTES = 16


class Namespace(Wire, frozen=True):
    """Identifies the KV in a store. Blocks of different namespaces are never mixed.

    Attributes:
        model_digest: digest of all weights, as hex.
        dtype: of the stored KV.
        layout: order of layers, heads and tokens in a block, and which part of them (tensor parallelism).
        block_size: tokens in a block.
        salt: separates tenants or deployments; only its digest is stored.
        adapter: digest of a LoRA adapter's weights; empty without one.
    """

    model_digest: str
    dtype: str
    layout: str
    block_size: int
    salt: bytes = b""
    adapter: str = ""

    @property
    def digest(self) -> bytes:
        """16 bytes; different namespaces have different ones."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=DIGEST_BYTES).digest()

    @property
    def text(self) -> str:
        """All fields as JSON, for messages; the salt is a digest."""
        salt = hashlib.blake2b(self.salt, digest_size=4).hexdigest() if self.salt else ""
        fields = msgspec.to_builtins(self) | {"salt": salt}
        return msgspec.json.encode(fields).decode()


Bytes = NDArray[np.uint8]
Buffers = Sequence[Any] | Bytes
"""One contiguous buffer (numpy array, memoryview, bytearray) for each block, or an (n, block_bytes) array."""


def block_views(buffers: Buffers, block_bytes: int, *, writable: bool) -> list[Bytes]:
    """View each buffer as (block_bytes,) uint8.

    Raises:
        ValueError: a buffer has another size, is not contiguous, or is read-only although `writable`.
    """
    views = []
    for buffer in buffers:
        memory = memoryview(buffer)
        if not memory.c_contiguous or memory.nbytes != block_bytes or (writable and memory.readonly):
            raise ValueError(
                f"buffers: expected {block_bytes} contiguous{' writable' if writable else ''} bytes for each block, got"
                f" {memory.nbytes} bytes, contiguous: {memory.c_contiguous}, read-only: {memory.readonly}"
            )
        views.append(np.frombuffer(memory, np.uint8))
    return views


@dataclass(slots=True, eq=False)
class Gate:
    """Open until the caller, who owns the memory, closes it. Thread-safe."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _inside: int = 0
    _is_closed: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether threads may no longer use the memory."""
        return self._is_closed

    def copy(self, target: Bytes, source: Bytes) -> bool:
        """Copy unless the gate is closed; returns whether it was open."""
        with self._changed:
            if self._is_closed:
                return False
            self._inside += 1
        target[:] = source
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
        return True

    def close(self) -> None:
        """Refuse further copies, and wait for those under way, which takes microseconds."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._inside)


@dataclass(slots=True, eq=False)
class Attempt:
    """One operation that the breaker let through."""

    is_probe: bool


class CircuitBreaker:
    """On until `failures_max` operations in a row have failed, then off for a pause, then half open.

    A half-open breaker lets one operation through, the probe. If the probe succeeds the breaker is on again; if it fails the
    next pause is twice as long. One task owns it; the event loop is its clock.

    Attributes:
        name: the tier's name in the log.
    """

    def __init__(
        self, name: str, *, failures_max: int = 3, pause_s: float = 1.0, pause_max_s: float = 60.0
    ) -> None:
        """Begin on.

        Args:
            name: the tier's name in the log.
            failures_max: failures in a row that turn it off, at least 1.
            pause_s: how long it is off at first.
            pause_max_s: the longest pause.
        """
        self.name = name
        self._failures_max = failures_max
        self._first_pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._failures = 0
        self._pause_s = 0.0  # above 0: off
        self._retry_at_s = 0.0
        self._is_probing = False

    @property
    def is_on(self) -> bool:
        """Whether it is on, and not half open."""
        return self._pause_s == 0

    @property
    def lets_through(self) -> bool:
        """Whether `begin` would let an operation through now."""
        return self.is_on or (not self._is_probing and asyncio.get_running_loop().time() >= self._retry_at_s)

    def begin(self) -> Attempt | None:
        """Ask to run an operation; None if it must not run. Report its end with `succeeded`, `failed` or `abandoned`."""
        if not self.lets_through:
            return None
        self._is_probing = not self.is_on
        return Attempt(self._is_probing)

    def succeeded(self, attempt: Attempt) -> None:
        """Report that an operation succeeded: the breaker is on, even if the operation began before it went off."""
        self._failures = 0
        self._is_probing &= not attempt.is_probe
        if not self.is_on:
            self._pause_s = 0.0
            get_logger().info("kv_tier_on", tier=self.name)

    def failed(self, attempt: Attempt, error: Exception) -> None:
        """Report that an operation failed, or took too long."""
        self._failures += 1
        if attempt.is_probe:
            self._is_probing = False
            self._turn_off(min(2 * self._pause_s, self._pause_max_s))
        elif self.is_on and self._failures >= self._failures_max:
            self.trip(error)

    def abandoned(self, attempt: Attempt) -> None:
        """Report that an operation was cancelled, which says nothing about the tier."""
        self._is_probing &= not attempt.is_probe

    def trip(self, error: Exception) -> None:
        """Turn it off at once, with one warning; no effect if it is off."""
        if not self.is_on:
            return
        self._turn_off(self._first_pause_s)
        get_logger().warning(
            "kv_tier_off",
            tier=self.name,
            error=str(error),
            effect="blocks are computed instead; the tier is tried again by itself",
            retry_s=self._pause_s,
        )

    def _turn_off(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._retry_at_s = asyncio.get_running_loop().time() + pause_s


class BlockStore(Protocol):
    """Keeps blocks by their hash: a `SlotFile`, or `ObjectPacks`."""

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that are held, without asking a disk or network."""
        ...

    async def load(self, block_hashes: HashArray, targets: Buffers, *, timeout_s: float | None = None) -> int:
        """Load and verify leading blocks; returns how many.

        Raises:
            TransferError: it failed.
            DeadlineExceeded: it took too long. Targets are not written any more.
        """
        ...

    async def store(
        self,
        block_hashes: HashArray,
        sources: Buffers,
        *,
        parent: int | None = None,
        timeout_s: float | None = None,
        on_copied: Callable[[], None] | None = None,
    ) -> int:
        """Store blocks; returns how many leading ones are held, or will be.

        Args:
            block_hashes: (n, 2) uint64, each block the child of the one before it.
            sources: n buffers.
            parent: low64 of the first block's parent, None at the root.
            timeout_s: deadline, None for none.
            on_copied: called once if sources are read no more some time before this ends.

        Raises:
            TransferError: it failed.
            DeadlineExceeded: it took too long.
        """
        ...


class GuardedStore:
    """A `BlockStore` without errors of disks and networks. While its breaker is off it holds no blocks."""

    def __init__(self, store: BlockStore, breaker: CircuitBreaker, *, timeout_s: float) -> None:
        """Guard a store.

        Args:
            store: the store.
            breaker: its own breaker.
            timeout_s: the longest time of one operation; longer ones count as failures.
        """
        self.breaker = breaker
        self._store = store
        self._timeout_s = timeout_s

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that `load` would try to load."""
        return self._store.locate(block_hashes) if self.breaker.lets_through else 0

    async def load(self, block_hashes: HashArray, targets: Buffers) -> int:
        """Load and verify leading blocks; returns how many, 0 after an error.

        Raises:
            ValueError: a target has another size, or is read-only.
        """
        if not self._store.locate(block_hashes):
            return 0  # says nothing about the tier
        return await self._try(lambda: self._store.load(block_hashes, targets, timeout_s=self._timeout_s))

    async def store(
        self,
        block_hashes: HashArray,
        sources: Buffers,
        *,
        parent: int | None = None,
        on_copied: Callable[[], None] | None = None,
    ) -> int:
        """Store blocks, with arguments as above; returns how many leading ones are held, 0 after an error.

        Raises:
            ValueError: a source has another size.
        """
        return await self._try(
            lambda: self._store.store(
                block_hashes, sources, parent=parent, timeout_s=self._timeout_s, on_copied=on_copied
            )
        )

    async def _try(self, operation: Callable[[], Awaitable[int]]) -> int:
        attempt = self.breaker.begin()
        if attempt is None:
            return 0
        try:
            done = await operation()
        except (TransferError, DeadlineExceeded) as error:
            self.breaker.failed(attempt, error)
            return 0
        except (asyncio.CancelledError, ValueError):
            self.breaker.abandoned(attempt)
            raise
        except Exception as error:  # noqa: BLE001 - a probe that ends untold would keep the tier off for good
            self.breaker.failed(attempt, error)
            return 0
        self.breaker.succeeded(attempt)
        return done
