"""A prefill worker's side of a hand-over: blocks held for whoever goes on, for a while."""

import asyncio
from dataclasses import dataclass
from itertools import count

import numpy as np

from penstock.core.ids import BlockId, PinId, RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types import EngineInfo, KvHandle, Request
from penstock.core.wire import unpack_hashes
from penstock.seams import KvBlocks
from penstock.worker.config import HandOverConfig
from penstock.worker.kv_regions import KvRegions

_log = get_logger()


@dataclass(frozen=True, slots=True)
class _Offer:
    request_id: RequestId
    block_ids: list[BlockId]
    timer: asyncio.TimerHandle


class Offers:
    """The prompts that this worker has prefilled for others. One event loop owns it."""

    def __init__(
        self, engine: KvBlocks, info: EngineInfo, producer: WorkerId, config: HandOverConfig
    ) -> None:
        """Offer nothing yet.

        Args:
            engine: a started one.
            info: what it said of itself.
            producer: this worker.
            config: how much is held, and for how long.
        """
        self.expired = 0
        """Offers that nobody took in time."""
        self.refused = 0
        """Prompts that went without their KV, as too much was held."""
        self.none_left = asyncio.Event()
        """Set while nothing is held."""
        self.none_left.set()
        self._engine = engine
        self._info = info
        self._producer = producer
        self._config = config
        self._ids = count(1)
        self._held: dict[PinId, _Offer] = {}
        self._held_blocks = 0
        self._pins: dict[RequestId, PinId] = {}

    def __len__(self) -> int:
        return len(self._held)

    def make(self, request: Request, regions: KvRegions, agent: bytes) -> KvHandle | None:
        """Hold the full blocks of a request whose prompt was computed this moment.

        Args:
            request: as it came.
            regions: of the engine's memory.
            agent: metadata that gives them.

        Returns:
            None where nothing can be held.
        """
        hashes = unpack_hashes(request.block_hashes).reshape(-1, 2)
        room = int(self._config.pinned_share_max * self._info.total_blocks) - self._held_blocks
        if len(hashes) > room:
            self.refused += 1
            return None
        block_ids = list(self._engine.pin(hashes))
        if not block_ids:
            return None
        pin_id = PinId(next(self._ids))
        timer = asyncio.get_running_loop().call_later(self._config.pin_ttl_s, self._expire, pin_id)
        self._held[pin_id] = _Offer(request.request_id, block_ids, timer)
        self._pins[request.request_id] = pin_id
        self.none_left.clear()
        self._held_blocks += len(block_ids)
        return KvHandle(
            producer=self._producer,
            pin_id=pin_id,
            ttl_s=self._config.pin_ttl_s,
            num_tokens=len(block_ids) * self._info.block_size,
            block_ids=np.array(block_ids, dtype="<u4").tobytes(),
            agent=agent,
            layout=regions.encoded,
            regions=regions.ids,
        )

    def take_back(self, pin_id: PinId) -> bool:
        """Let an offer's blocks go: they were read, or are not wanted.

        Returns:
            whether they were held until now; if not, what was read in the meantime may be anything.
        """
        offer = self._held.pop(pin_id, None)
        if offer is None:
            return False
        offer.timer.cancel()
        if self._pins.get(offer.request_id) == pin_id:
            del self._pins[offer.request_id]
        self._held_blocks -= len(offer.block_ids)
        self._engine.unpin(offer.block_ids)
        if not self._held:
            self.none_left.set()
        return True

    def forget(self, request_id: RequestId) -> None:
        """Let the blocks of a request go that nobody goes on with; no error where there are none."""
        pin_id = self._pins.get(request_id)
        if pin_id is not None:
            self.take_back(pin_id)

    def close(self) -> None:
        """Let everything go."""
        for pin_id in list(self._held):
            self.take_back(pin_id)

    def check(self) -> None:
        """Raise AssertionError where the sum is wrong."""
        assert self.none_left.is_set() == (not self._held), "set exactly while nothing is held"
        assert self._held_blocks == sum(len(offer.block_ids) for offer in self._held.values())
        assert all(self._held[pin_id].request_id == request for request, pin_id in self._pins.items())

    def _expire(self, pin_id: PinId) -> None:
        self.expired += 1
        _log.warning("kv_offer_expired", pin_id=pin_id, ttl_s=self._config.pin_ttl_s)
        self.take_back(pin_id)
