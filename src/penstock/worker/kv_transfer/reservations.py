"""Blocks for incoming KV: a prompt's cached blocks are pinned, and blocks for the rest are reserved."""

import asyncio

from penstock.core.errors import TransferError
from penstock.core.ids import BlockId
from penstock.core.types.instances import EngineInfo
from penstock.core.wire import HashArray
from penstock.seams import KvBlocks

HeldBlocks = tuple[list[BlockId], list[BlockId]]
"""(pinned leading blocks that are cached here, blocks reserved for the rest)."""


class BlockReservations:
    """One engine's reservations. One event loop owns it. A request that waits holds no blocks, so two cannot deadlock."""

    def __init__(self, engine: KvBlocks, info: EngineInfo) -> None:
        """Make an empty set; `info` is the engine's info."""
        self._engine = engine
        self._info = info
        self._turn = asyncio.Lock()  # held by the first waiter; others queue for it
        self._freed = asyncio.Event()

    async def hold(self, hashes: HashArray) -> HeldBlocks:
        """Pin a prompt's cached blocks and reserve blocks for the rest; wait, first come first served, until enough are free.

        Raises:
            TransferError: the engine has fewer blocks in all.
        """
        held = list(self._engine.pin(hashes))
        if len(held) == len(hashes):
            return held, []
        self._engine.unpin(held)
        async with self._turn:
            while (taken := self._try_to_hold(hashes)) is None:
                self._freed.clear()
                await self._freed.wait()
            return taken

    def try_hold(self, hashes: HashArray) -> HeldBlocks | None:
        """Do the same without waiting; None if too few blocks are free, or a request waits in `hold`.

        Raises:
            TransferError: the engine has fewer blocks in all.
        """
        return None if self._turn.locked() else self._try_to_hold(hashes)

    def release(self, held: HeldBlocks) -> None:
        """Unpin the blocks; published ones stay in the prefix cache until they are evicted."""
        here, reserved = held
        self._engine.unpin(reserved)
        self._engine.unpin(here)
        self._freed.set()

    def blocks_freed(self) -> None:
        """Note that the engine may have freed blocks."""
        self._freed.set()

    def check_idle(self) -> None:
        """Raise AssertionError if a request waits."""
        assert not self._turn.locked(), "a request still waits for blocks"

    def _try_to_hold(self, hashes: HashArray) -> HeldBlocks | None:
        here = list(self._engine.pin(hashes))
        lacking = len(hashes) - len(here)
        if lacking >= self._info.total_blocks:
            self._engine.unpin(here)
            raise TransferError(f"{lacking} blocks do not fit into {self._info.total_blocks}")
        reserved = self._engine.reserve(lacking) if lacking else []
        if reserved is None:
            self._engine.unpin(here)
            return None
        return here, list(reserved)
