"""A block store behind a circuit breaker: an operation that fails finds or stores no blocks, and raises nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.core.errors import DeadlineExceeded, TransferError
from penstock.core.wire import HashArray
from penstock.kv.breaker import CircuitBreaker
from penstock.kv.buffers import Buffers


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
