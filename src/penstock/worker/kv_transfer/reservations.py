"""Block reservations for incoming KV: a prompt's cached blocks, pinned, and reserved ones for the rest."""

import asyncio

from penstock.core.errors import TransferError
from penstock.core.ids import BlockId
from penstock.core.types.instances import EngineInfo
from penstock.core.wire import HashArray
from penstock.seams import KvBlocks

HeldBlocks = tuple[list[BlockId], list[BlockId]]
"""A prompt's leading blocks that are here, and the reserved ones for the rest."""


class BlockReservations:
    """One engine's reservations. Its event loop owns it. A waiting request holds no blocks, so that two cannot deadlock."""

    def __init__(self, engine: KvBlocks, info: EngineInfo) -> None:
        """Hold nothing; `info` is what the engine said of itself."""
        self._engine = engine
        self._info = info
        self._turn = asyncio.Lock()  # whose turn it is to wait
        self._freed = asyncio.Event()

    async def hold(self, hashes: HashArray) -> HeldBlocks:
        """Hold what is here of a prompt, and room for what is not; waits in turn while what runs needs the room.

        Raises:
            TransferError: there is never as much.
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

    def hold_early(self, hashes: HashArray) -> HeldBlocks | None:
        """Hold the same for a prompt that is still being computed; None where somebody waits whose prompt is, or there is no room.

        Raises:
            TransferError: there is never as much.
        """
        return None if self._turn.locked() else self._try_to_hold(hashes)

    def let_go(self, held: HeldBlocks) -> None:
        """Give up both; what has been published stays cached while there is room."""
        here, reserved = held
        self._engine.unpin(reserved)
        self._engine.unpin(here)
        self._freed.set()

    def given_back(self) -> None:
        """Hear that the engine may have given blocks back."""
        self._freed.set()

    def check_idle(self) -> None:
        """Raise AssertionError where somebody waits."""
        assert not self._turn.locked(), "somebody still waits for room"

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
