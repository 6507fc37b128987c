"""Reads other workers' blocks, and hears from these whether the blocks were held until that was done."""

import asyncio
from collections.abc import Sequence
from itertools import count

from penstock.core.descriptors import TransferOp
from penstock.core.errors import PinExpired
from penstock.core.ids import BlockId
from penstock.core.types import KvHandle
from penstock.core.wire import HashArray, encode
from penstock.transfer import Peer, TransferAgent
from penstock.worker.kv_regions import KvRegions
from penstock.worker.pin_messages import PinHeld, PinRead

_LOOK_S = 0.1
"""So often a reader looks whether the producer it waits for is still there."""


class Reader:
    """One worker's. Its event loop owns it."""

    def __init__(self, agent: TransferAgent, regions: KvRegions) -> None:
        """Read nothing yet.

        Args:
            agent: moves the bytes.
            regions: where they belong.
        """
        self._agent = agent
        self._regions = regions
        self._read_ids = count(1)
        self._answers: dict[tuple[str, int], asyncio.Future[bool]] = {}

    async def read(
        self, peer: Peer, handle: KvHandle, targets: Sequence[BlockId], sources: HashArray
    ) -> None:
        """Copy blocks, and hear from their producer that they had been held until that was done.

        Raises:
            TransferError: the bytes did not come.
            PinExpired: they came, and may be anything.
        """
        read_id = next(self._read_ids)  # an answer to somebody else who reads the same is not for this one
        done = encode(PinRead(pin_id=handle.pin_id, read_id=read_id))
        key = peer.name, read_id
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        try:
            ranges = self._regions.ranges(handle, sources, targets)
            if ranges is None:
                self._agent.send_notification(peer, done)
            else:
                await self._agent.post(TransferOp.READ, *ranges, peer, notify=done).complete()
            if not await self._or_lost(peer, answer):
                raise PinExpired(
                    f"pin {handle.pin_id} of {peer.name} had expired before its blocks were read"
                )
        finally:
            del self._answers[key]

    def answered(self, peer: str, answer: PinHeld) -> None:
        """Take a producer's answer; one that nobody waits for (any more) is no error."""
        waiting = self._answers.get((peer, answer.read_id))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.was_held)

    def check_idle(self) -> None:
        """Raise AssertionError where an answer is still waited for."""
        assert not self._answers, f"{list(self._answers)} are still waited for"

    async def _or_lost(self, peer: Peer, answer: "asyncio.Future[bool]") -> bool:
        """Wait for a producer's answer for as long as there is a producer."""
        while not answer.done():
            peer.check_alive()
            await asyncio.wait([answer], timeout=_LOOK_S)
        return answer.result()
