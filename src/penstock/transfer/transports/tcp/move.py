"""Transfers by transport `tcp`, ready to be run any number of times: small ones in one message, large ones in pieces."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from penstock.core.descriptors import OffsetArray, TransferOp
from penstock.transfer.transports.tcp.frames import PackedRanges


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one exchange moves."""

    packed: PackedRanges
    addresses: OffsetArray
    lengths: OffsetArray
    num_bytes: int


class Channel(Protocol):
    """The way to a peer, as far as moves need it. All of them raise TransferError where it fails."""

    async def put(self, piece: Piece, *, checksum: bool) -> None: ...

    async def get(self, piece: Piece, *, checksum: bool) -> None: ...

    async def push(self, op: TransferOp, piece: Piece, *, checksum: bool) -> None: ...


class Nothing:
    """Moves nothing."""

    def run_now(self) -> bool:
        return True

    async def run(self) -> None: ...


class SmallMove:
    """Goes over the link, in one message."""

    def __init__(self, channel: Channel, op: TransferOp, piece: Piece, *, checksum: bool) -> None:
        self._ask = channel.get if op is TransferOp.READ else channel.put
        self._piece = piece
        self._checksum = checksum

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        await self._ask(self._piece, checksum=self._checksum)


class LargeMove:
    """Goes over streams, in pieces."""

    def __init__(self, channel: Channel, op: TransferOp, pieces: list[Piece], *, checksum: bool) -> None:
        self._channel = channel
        self._op = op
        self._pieces = pieces
        self._checksum = checksum

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for piece in self._pieces:
                    group.create_task(self._channel.push(self._op, piece, checksum=self._checksum))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
