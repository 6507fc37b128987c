"""The prefill worker's side of KV transfers: blocks are pinned as they are computed, and decode workers are notified."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from penstock.core.ids import BlockId, PinId, RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import EngineInfo
from penstock.core.types.requests import KvHandle, Request
from penstock.core.wire import HashArray, num_tokens, unpack_hashes
from penstock.seams import KvBlocks, KvPartialBlocks
from penstock.worker.config import KvTransferConfig
from penstock.worker.kv_transfer.reader import KvRegions, PinGrown, PinHeld, names_of

_NO_PIN = PinId(0)

_log = get_logger()

Notify = Callable[[str, PinGrown | PinHeld], None]
"""Sends a message to the agent of this name."""
Followers = dict[str, int]
"""Agents subscribed to a transfer -> their read ids."""


@dataclass(slots=True)
class _Prompt:
    """A prompt to export. It is under way until its last token is computed, and pinned at most once until then."""

    request_id: RequestId
    transfer_id: bytes
    owner: Hashable
    followers: Followers
    pin_id: PinId | None = None
    is_under_way: bool = True


@dataclass(slots=True)
class _Early:
    """Followers of a transfer whose request has not arrived; `timer` ends their wait."""

    timer: asyncio.TimerHandle
    followers: Followers = field(default_factory=dict)


@dataclass(slots=True)
class _Export:
    """The pin of one prompt.

    hashes:      (n, 2) uint64 of all full blocks of the prompt, and of its last window in other groups of layers
    block_ids:   blocks pinned so far; grows to n until `is_whole`
    num_counted: blocks that count against `pinned_share_max`
    num_told:    leading `block_ids` that followers know
    tail:        the pinned partial block, or empty; it has no hash
    tail_tokens: tokens in the partial block
    num_leading: full blocks of the prompt
    """

    prompt: _Prompt
    hashes: HashArray
    block_ids: list[BlockId]
    num_counted: int
    timer: asyncio.TimerHandle
    num_told: int = 0
    is_whole: bool = False
    tail: list[BlockId] = field(default_factory=list)
    tail_tokens: int = 0
    num_leading: int = 0


class KvExports:
    """Prompts that this worker prefills for decode workers. One event loop owns it."""

    def __init__(
        self,
        engine: KvBlocks,
        info: EngineInfo,
        prefill_worker: WorkerId,
        config: KvTransferConfig,
        *,
        notify: Notify,
    ) -> None:
        """Make an empty set.

        Args:
            engine: started.
            info: the engine's info.
            prefill_worker: this worker.
            config: how many blocks may be pinned, and for how long.
            notify: sends messages to followers.
        """
        self.expired = 0
        """Exports that no decode worker read in time."""
        self.refused = 0
        """Prompts without a KV handle, since too many blocks were pinned."""
        self.none_left = asyncio.Event()
        """Set while nothing is pinned."""
        self.none_left.set()
        self._engine = engine
        self._partial_blocks = engine if isinstance(engine, KvPartialBlocks) else None
        self._info = info
        self._prefill_worker = prefill_worker
        self._config = config
        self._notify = notify
        self._ids = count(1)
        self._held: dict[PinId, _Export] = {}
        self._held_blocks = 0
        self._pins: dict[RequestId, PinId] = {}
        self._prompts: dict[RequestId, _Prompt] = {}  # under way
        self._transfers: dict[bytes, _Prompt] = {}  # under way or pinned, by transfer id
        self._early: dict[bytes, _Early] = {}  # by transfer id

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, request: Request, owner: Hashable) -> None:
        """Register a prefill-only request that was submitted to the engine.

        Args:
            request: as it arrived.
            owner: its frontend; `drop_owner` drops its requests.
        """
        self._prompts[request.request_id] = self._prompt(request, owner)

    def follow(self, transfer_id: bytes, agent: str, read_id: int) -> None:
        """Notify an agent of a transfer's blocks, now and as they are computed; the request may arrive later."""
        prompt = self._transfers.get(transfer_id)
        if prompt is not None:
            prompt.followers[agent] = read_id
            export = None if prompt.pin_id is None else self._held.get(prompt.pin_id)
            if export is not None and prompt.pin_id is not None:
                self._notify(agent, _grown(prompt.pin_id, export, read_id, 0))
            return
        early = self._early.get(transfer_id)
        if early is None:
            if len(self._early) >= self._config.fetches_max:
                self._end_early(next(iter(self._early)))
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._config.pin_ttl_s, self._end_early, transfer_id)
            early = self._early[transfer_id] = _Early(timer)
        early.followers[agent] = read_id

    def grow(self, request: Request) -> None:
        """Pin the blocks computed so far of a prompt under way, and notify followers.

        A prompt whose pin was withdrawn is pinned again only by `make`, at its end.
        """
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return
        if prompt.pin_id is None:
            pin_id = self._pin(request, prompt)
            if pin_id is not None:
                self._notify_grown(pin_id)
        elif prompt.pin_id in self._held:
            self._extend(prompt.pin_id)

    def make(self, request: Request, owner: Hashable, regions: KvRegions, agent: bytes) -> KvHandle | None:
        """Pin all blocks of a prompt whose last step has just ended, and notify followers.

        Args:
            request: as it arrived.
            owner: its frontend.
            regions: the engine's registered memory.
            agent: metadata of this worker's agent.

        Returns:
            the handle for the decode worker; None if no blocks could be pinned.
        """
        prompt = self._prompts.pop(request.request_id, None) or self._prompt(request, owner)
        prompt.is_under_way = False
        pin_id = prompt.pin_id if prompt.pin_id in self._held else self._pin(request, prompt)
        if pin_id is None:
            self.refused += len(request.block_hashes) > 0
            self._end(prompt)
            return None
        self._extend(pin_id, request)
        return self._handle(pin_id, regions, agent)

    def holds(self, pin_id: PinId) -> bool:
        """Say whether all blocks ever announced for a pin have been what they were since."""
        return pin_id in self._held

    def unpin(self, pin_id: PinId) -> None:
        """Unpin an export's blocks: they were read, or are not needed. No error if they are not pinned any more."""
        export = self._held.pop(pin_id, None)
        if export is None:
            return
        export.timer.cancel()
        if self._pins.get(export.prompt.request_id) == pin_id:
            del self._pins[export.prompt.request_id]
        self._forget_transfer(export.prompt)
        self._held_blocks -= export.num_counted
        self._engine.unpin([*export.block_ids, *export.tail])
        if not self._held:
            self.none_left.set()

    def forget(self, request_id: RequestId, owner: Hashable) -> None:
        """Unpin the blocks of a request that its owner has dropped; no error if there are none."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and prompt.owner is owner:
            del self._prompts[request_id]
            prompt.is_under_way = False
            if prompt.pin_id not in self._held:
                self._end(prompt)
        pin_id = self._pins.get(request_id)
        if pin_id is not None and self._held[pin_id].prompt.owner is owner:
            self._withdraw(pin_id)

    def drop_owner(self, owner: Hashable) -> None:
        """Unpin all blocks of an owner's requests."""
        for request_id in [request_id for request_id, one in self._prompts.items() if one.owner is owner]:
            self.forget(request_id, owner)
        for pin_id in [pin_id for pin_id, export in self._held.items() if export.prompt.owner is owner]:
            self._withdraw(pin_id)

    def yield_blocks(self) -> None:
        """Unpin prompts that are still being computed, since the engine ran out of blocks to compute them."""
        for pin_id in [pin_id for pin_id, export in self._held.items() if not export.is_whole]:
            self._withdraw(pin_id)

    def close(self) -> None:
        """Unpin everything."""
        for pin_id in list(self._held):
            self.unpin(pin_id)
        for early in self._early.values():
            early.timer.cancel()
        self._early.clear()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert self.none_left.is_set() == (not self._held), "set exactly while nothing is held"
        assert self._blocks_left >= 0, "no more than its share"
        assert self._held_blocks == sum(export.num_counted for export in self._held.values())
        assert all(self._held[pin_id].prompt.request_id == request for request, pin_id in self._pins.items())
        assert len(self._early) <= self._config.fetches_max, (
            f"{len(self._early)} transfers are followed early"
        )
        for pin_id, export in self._held.items():
            prompt = export.prompt
            assert export.is_whole or prompt.is_under_way, "what grows is under way"
            assert prompt.pin_id == pin_id, "each prompt has one pin"
            assert export.num_told == len(export.block_ids), "followers know all that is held"
            assert len(export.block_ids) + len(export.tail) <= export.num_counted, "what is held counts"
        under_way = [prompt for prompt in self._prompts.values() if prompt.transfer_id]
        pinned = [export.prompt for export in self._held.values() if export.prompt.transfer_id]
        known = {id(prompt) for prompt in (*under_way, *pinned)}
        assert known == {id(prompt) for prompt in self._transfers.values()}, "transfers: those of prompts"

    def check_idle(self) -> None:
        """Raise AssertionError if anything of a request is left."""
        assert not self._held, f"pins {list(self._held)} are left"
        assert not self._prompts, f"{list(self._prompts)} are still expected to end"
        assert not self._early, f"{len(self._early)} transfers are followed whose requests never arrived"

    def _prompt(self, request: Request, owner: Hashable) -> _Prompt:
        early = self._early.pop(request.transfer_id, None)
        if early is not None:
            early.timer.cancel()
        followers = {} if early is None else early.followers
        prompt = _Prompt(request.request_id, request.transfer_id, owner, followers)
        if request.transfer_id:
            self._transfers[request.transfer_id] = prompt
        return prompt

    def _forget_transfer(self, prompt: _Prompt) -> None:
        if not prompt.is_under_way and self._transfers.get(prompt.transfer_id) is prompt:
            del self._transfers[prompt.transfer_id]

    def _pin(self, request: Request, prompt: _Prompt) -> PinId | None:
        """Pin the blocks computed so far; None if there are none, or the prompt exceeds `pinned_share_max`."""
        names = names_of(self._engine, unpack_hashes(request.block_hashes).reshape(-1, 2))
        hashes = names.hashes
        if len(hashes) > self._blocks_left:
            return None
        block_ids = list(self._engine.pin(hashes))
        if not block_ids:
            return None
        prompt.pin_id = pin_id = PinId(next(self._ids))
        self._held[pin_id] = _Export(
            prompt, hashes, block_ids, len(hashes), self._timer(pin_id), num_leading=names.num_leading
        )
        self._pins[request.request_id] = pin_id
        self.none_left.clear()
        self._held_blocks += len(hashes)
        return pin_id

    @property
    def _blocks_left(self) -> int:
        """Blocks that may still be pinned."""
        return int(self._config.pinned_share_max * self._info.total_blocks) - self._held_blocks

    def _claim_partial_block(self, request: Request, export: _Export) -> None:
        """Pin the partial last block, if the engine supports that and all full blocks are pinned."""
        if (
            self._partial_blocks is None
            or len(export.block_ids) < len(export.hashes)
            or self._blocks_left < 1
        ):
            return
        tail = self._partial_blocks.claim_partial_block(request.request_id)
        if tail is not None:
            export.tail = [tail]
            export.tail_tokens = num_tokens(request.token_ids) % self._info.block_size
            export.num_counted += 1
            self._held_blocks += 1

    def _extend(self, pin_id: PinId, ended: Request | None = None) -> None:
        """Pin the blocks computed since; with `ended`, the request has just ended and the pin is whole."""
        export, is_whole = self._held[pin_id], ended is not None
        more = self._engine.pin(export.hashes[len(export.block_ids) :])
        if not (more or is_whole):
            return
        export.block_ids += more
        export.timer.cancel()
        export.timer = self._timer(pin_id)
        export.is_whole = is_whole
        if ended is not None:
            self._held_blocks -= export.num_counted - len(export.block_ids)
            export.num_counted = len(export.block_ids)
            self._claim_partial_block(ended, export)
        self._notify_grown(pin_id)

    def _handle(self, pin_id: PinId, regions: KvRegions, agent: bytes) -> KvHandle:
        export = self._held[pin_id]
        num_full = export.num_counted - len(export.tail)
        return KvHandle(
            prefill_worker=self._prefill_worker,
            pin_id=pin_id,
            ttl_s=self._config.pin_ttl_s,
            num_tokens=min(num_full, export.num_leading) * self._info.block_size + export.tail_tokens,
            block_ids=_packed([*export.block_ids, *export.tail]),
            source=regions.source(agent),
        )

    def _timer(self, pin_id: PinId) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._config.pin_ttl_s, self._expire, pin_id)

    def _notify_grown(self, pin_id: PinId) -> None:
        export = self._held[pin_id]
        for agent, read_id in export.prompt.followers.items():
            self._notify(agent, _grown(pin_id, export, read_id, export.num_told))
        export.num_told = len(export.block_ids)

    def _withdraw(self, pin_id: PinId) -> None:
        """Unpin an export and notify its followers."""
        prompt = self._held[pin_id].prompt
        self.unpin(pin_id)
        self._end(prompt, pin_id)

    def _end(self, prompt: _Prompt, pin_id: PinId = _NO_PIN) -> None:
        """Tell a prompt's followers that no more blocks come."""
        self._notify_end(prompt.followers, pin_id)
        prompt.followers = {}
        self._forget_transfer(prompt)

    def _end_early(self, transfer_id: bytes) -> None:
        early = self._early.pop(transfer_id)
        early.timer.cancel()
        self._notify_end(early.followers, _NO_PIN)

    def _notify_end(self, followers: Followers, pin_id: PinId) -> None:
        for agent, read_id in followers.items():
            self._notify(agent, PinHeld(pin_id=pin_id, was_held=False, read_id=read_id))

    def _expire(self, pin_id: PinId) -> None:
        self.expired += 1
        _log.warning("kv_export_expired", pin_id=pin_id, ttl_s=self._config.pin_ttl_s)
        self._withdraw(pin_id)


def _grown(pin_id: PinId, export: _Export, read_id: int, first: int) -> PinGrown:
    return PinGrown(
        pin_id=pin_id,
        read_id=read_id,
        first=first,
        block_ids=_packed([*export.block_ids[first:], *export.tail]),
        is_whole=export.is_whole,
        tail_tokens=export.tail_tokens,
    )


def _packed(block_ids: list[BlockId]) -> bytes:
    return np.array(block_ids, dtype="<u4").tobytes()
