"""An engine's blocks for KV that comes from elsewhere: what of a prompt is here, and room for what is not."""

import asyncio

from penstock.core.errors import TransferError
from penstock.core.ids import BlockId
from penstock.core.types import EngineInfo
from penstock.core.wire import HashArray
from penstock.seams import KvBlocks

Held = tuple[list[BlockId], list[BlockId]]
"""A prompt's leading blocks that are here, and the reserved ones for the rest."""


class Room:
    """One engine's. Its event loop owns it. Who waits holds nothing: its prefix could keep others, and these it, from any room."""

    def __init__(self, engine: KvBlocks, info: EngineInfo) -> None:
        """Hold nothing; `info` is what the engine said of itself."""
        self._engine = engine
        self._info = info
        self._turn = asyncio.Lock()  # whose turn it is to wait
        self._news = asyncio.Event()

    async def hold(self, hashes: HashArray) -> Held:
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
                self._news.clear()
                await self._news.wait()
            return taken

    def hold_early(self, hashes: HashArray) -> Held | None:
        """Hold the same for a prompt that is still being computed; None where somebody waits whose prompt is, or there is no room.

        Raises:
            TransferError: there is never as much.
        """
        return None if self._turn.locked() else self._try_to_hold(hashes)

    def let_go(self, held: Held) -> None:
        """Give up both; what has been published stays cached while there is room."""
        here, reserved = held
        self._engine.unpin(reserved)
        self._engine.unpin(here)
        self._news.set()

    def given_back(self) -> None:
        """Hear that the engine may have given blocks back."""
        self._news.set()

    def check_idle(self) -> None:
        """Raise AssertionError where somebody waits."""
        assert not self._turn.locked(), "somebody still waits for room"

    def _try_to_hold(self, hashes: HashArray) -> Held | None:
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
