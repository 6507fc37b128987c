"""A prefill worker's side of a hand-over: blocks held for whoever goes on, for a while."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from penstock.core.ids import BlockId, PinId, RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types import EngineInfo, KvHandle, Request
from penstock.core.wire import HashArray, num_tokens, unpack_hashes
from penstock.seams import KvBlocks, KvTails
from penstock.worker.config import HandOverConfig
from penstock.worker.kv_regions import KvRegions
from penstock.worker.pin_messages import PinGrown, PinHeld

_log = get_logger()

Tell = Callable[[str, PinGrown | PinHeld], None]
"""Sends a message to the agent of this name."""


@dataclass(slots=True)
class _Offer:
    """Blocks of one prompt. More of `hashes` follow until it `is_whole`; `num_counted` blocks count against the bound.

    `tail` is the block with the `tail_tokens` past the full ones, or none: it has no hash, and only the handle names it.
    `followers` are the read ids of those agents that are told when it grows.
    """

    request_id: RequestId
    owner: Hashable
    hashes: HashArray
    block_ids: list[BlockId]
    num_counted: int
    timer: asyncio.TimerHandle
    is_whole: bool = False
    tail: list[BlockId] = field(default_factory=list)
    tail_tokens: int = 0
    followers: dict[str, int] = field(default_factory=dict)


class Offers:
    """The prompts that this worker has prefilled for others, or does. One event loop owns it."""

    def __init__(
        self,
        engine: KvBlocks,
        info: EngineInfo,
        producer: WorkerId,
        config: HandOverConfig,
        *,
        tell: Tell,
    ) -> None:
        """Offer nothing yet.

        Args:
            engine: a started one.
            info: what it said of itself.
            producer: this worker.
            config: how much is held, and for how long.
            tell: reaches those that follow.
        """
        self.expired = 0
        """Offers that nobody took in time."""
        self.refused = 0
        """Prompts that went without their KV, as too much was held."""
        self.none_left = asyncio.Event()
        """Set while nothing is held."""
        self.none_left.set()
        self._engine = engine
        self._tails = engine if isinstance(engine, KvTails) else None
        self._info = info
        self._producer = producer
        self._config = config
        self._tell = tell
        self._ids = count(1)
        self._held: dict[PinId, _Offer] = {}
        self._held_blocks = 0
        self._pins: dict[RequestId, PinId] = {}
        self._opened: dict[RequestId, Hashable] = {}  # those under way that had their turn, by owner

    def __len__(self) -> int:
        return len(self._held)

    def open(self, request: Request, owner: Hashable, regions: KvRegions, agent: bytes) -> KvHandle | None:
        """Hold the full blocks of a prompt of which a part is computed; `grow` adds the others, and `make` the last ones.

        Returns:
            None where nothing can be held, and where that was done before: once for each time a request comes.
        """
        if request.request_id in self._opened:
            return None
        pin_id = self._hold(request, owner)
        if pin_id is None:
            return None
        self._opened[request.request_id] = owner
        return self._handle(pin_id, regions, agent)

    def grow(self, request_id: RequestId) -> None:
        """Hold what has been computed since of a prompt that was opened; no error where it was not."""
        pin_id = self._pins.get(request_id)
        if pin_id is not None:
            self._extend(pin_id)

    def make(self, request: Request, owner: Hashable, regions: KvRegions, agent: bytes) -> KvHandle | None:
        """Hold the blocks of a request whose prompt was computed this moment, the last one full or not.

        Args:
            request: as it came.
            owner: for whom, until `disown`.
            regions: of the engine's memory.
            agent: metadata that gives them.

        Returns:
            None where nothing can be held.
        """
        pin_id = self._pins.get(request.request_id) if request.request_id in self._opened else None
        self._opened.pop(request.request_id, None)
        if pin_id is None:
            pin_id = self._hold(request, owner)
        if pin_id is None:
            self.refused += len(request.block_hashes) > 0
            return None
        self._extend(pin_id, request)
        return self._handle(pin_id, regions, agent)

    def follow(self, pin_id: PinId, agent: str, read_id: int) -> None:
        """Tell an agent of an offer's blocks, and of those to come."""
        offer = self._held.get(pin_id)
        if offer is None:
            self._tell(agent, PinHeld(pin_id=pin_id, was_held=False, read_id=read_id))
            return
        offer.followers[agent] = read_id
        self._tell(agent, _grown(pin_id, offer, read_id, 0))

    def holds(self, pin_id: PinId) -> bool:
        """Say whether all blocks that an offer was said to have have been held since."""
        return pin_id in self._held

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
        self._held_blocks -= offer.num_counted
        self._engine.unpin([*offer.block_ids, *offer.tail])
        if not self._held:
            self.none_left.set()
        return True

    def forget(self, request_id: RequestId, owner: Hashable) -> None:
        """Let the blocks of a request go that its owner does not go on with; no error where there are none."""
        if self._opened.get(request_id) is owner:
            del self._opened[request_id]
        pin_id = self._pins.get(request_id)
        if pin_id is not None and self._held[pin_id].owner is owner:
            self._withdraw(pin_id)

    def disown(self, owner: Hashable) -> None:
        """Let everything go that was held for an owner."""
        for pin_id in [pin_id for pin_id, offer in self._held.items() if offer.owner is owner]:
            self._withdraw(pin_id)

    def give_way(self) -> None:
        """Let prompts go that are still being computed: the memory is needed for just that."""
        for pin_id in [pin_id for pin_id, offer in self._held.items() if not offer.is_whole]:
            self._withdraw(pin_id)

    def close(self) -> None:
        """Let everything go."""
        for pin_id in list(self._held):
            self.take_back(pin_id)

    def check(self) -> None:
        """Raise AssertionError where the sum is wrong."""
        assert self.none_left.is_set() == (not self._held), "set exactly while nothing is held"
        assert self._room >= 0, "no more than its share"
        assert self._held_blocks == sum(offer.num_counted for offer in self._held.values())
        assert all(self._held[pin_id].request_id == request for request, pin_id in self._pins.items())
        for offer in self._held.values():
            assert offer.is_whole or offer.request_id in self._opened, "who grows is under way"
            assert len(offer.block_ids) + len(offer.tail) <= offer.num_counted, "what is held counts"

    def check_idle(self) -> None:
        """Raise AssertionError where something of a request is left."""
        assert not self._held, f"pins {list(self._held)} are left"
        assert not self._opened, f"{list(self._opened)} are still taken to be computed"

    def _hold(self, request: Request, owner: Hashable) -> PinId | None:
        hashes = unpack_hashes(request.block_hashes).reshape(-1, 2)
        if len(hashes) > self._room:
            return None
        block_ids = list(self._engine.pin(hashes))
        if not block_ids:
            return None
        pin_id = PinId(next(self._ids))
        offer = _Offer(request.request_id, owner, hashes, block_ids, len(hashes), self._timer(pin_id))
        self._held[pin_id] = offer
        self._pins[request.request_id] = pin_id
        self.none_left.clear()
        self._held_blocks += offer.num_counted
        return pin_id

    @property
    def _room(self) -> int:
        """Blocks that may be held beside those that are."""
        return int(self._config.pinned_share_max * self._info.total_blocks) - self._held_blocks

    def _hold_tail(self, request: Request, offer: _Offer) -> None:
        """Hold the tokens past the full blocks, where the engine gives them and all blocks before them are held."""
        if self._tails is None or len(offer.block_ids) < len(offer.hashes) or self._room < 1:
            return
        tail = self._tails.claim_tail(request.request_id)
        if tail is not None:
            offer.tail = [tail]
            offer.tail_tokens = num_tokens(request.token_ids) % self._info.block_size
            offer.num_counted += 1
            self._held_blocks += 1

    def _extend(self, pin_id: PinId, ended: Request | None = None) -> None:
        """Hold what there is now of a prompt: all of it, where its request has `ended`."""
        offer, is_whole = self._held[pin_id], ended is not None
        known = len(offer.block_ids)
        more = self._engine.pin(offer.hashes[known:])
        if not (more or is_whole):
            return
        offer.block_ids += more
        offer.timer.cancel()
        offer.timer = self._timer(pin_id)
        offer.is_whole = is_whole
        if ended is not None:
            self._held_blocks -= offer.num_counted - len(offer.block_ids)
            offer.num_counted = len(offer.block_ids)
            self._hold_tail(ended, offer)
        for agent, read_id in offer.followers.items():
            self._tell(agent, _grown(pin_id, offer, read_id, known))

    def _handle(self, pin_id: PinId, regions: KvRegions, agent: bytes) -> KvHandle:
        offer = self._held[pin_id]
        num_full = offer.num_counted - len(offer.tail)
        return KvHandle(
            producer=self._producer,
            pin_id=pin_id,
            ttl_s=self._config.pin_ttl_s,
            num_tokens=num_full * self._info.block_size + offer.tail_tokens,
            block_ids=_packed([*offer.block_ids, *offer.tail]) if offer.is_whole else b"",
            agent=agent,
            layout=regions.encoded,
            regions=regions.ids,
        )

    def _timer(self, pin_id: PinId) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._config.pin_ttl_s, self._expire, pin_id)

    def _withdraw(self, pin_id: PinId) -> None:
        """Take an offer back, and tell those that follow it."""
        followers = self._held[pin_id].followers
        self.take_back(pin_id)
        for agent, read_id in followers.items():
            self._tell(agent, PinHeld(pin_id=pin_id, was_held=False, read_id=read_id))

    def _expire(self, pin_id: PinId) -> None:
        self.expired += 1
        _log.warning("kv_offer_expired", pin_id=pin_id, ttl_s=self._config.pin_ttl_s)
        self._withdraw(pin_id)


def _grown(pin_id: PinId, offer: _Offer, read_id: int, first: int) -> PinGrown:
    return PinGrown(
        pin_id=pin_id,
        read_id=read_id,
        first=first,
        block_ids=_packed([*offer.block_ids[first:], *offer.tail]),
        is_whole=offer.is_whole,
        tail_tokens=offer.tail_tokens,
    )


def _packed(block_ids: list[BlockId]) -> bytes:
    return np.array(block_ids, dtype="<u4").tobytes()
