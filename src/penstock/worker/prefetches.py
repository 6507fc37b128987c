"""KV of prompts that other workers are still computing, fetched piece by piece as they go.

All of it is a hint: the request comes once its first token is there, and then finds its blocks in the prefix cache, or
some of them, and fetches what it lacks as any other. Each piece is read and confirmed as a whole hand-over is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from penstock.core.errors import EngineError, Overloaded, PenstockError
from penstock.core.ids import BlockId, PinId, RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types import EngineInfo, KvHandle, Prefetch
from penstock.core.wire import HashArray, unpack_hashes
from penstock.seams import KvBlocks, KvTails
from penstock.transfer import Peer
from penstock.worker.config import HandOverConfig
from penstock.worker.pin_messages import PinCheck
from penstock.worker.reader import Growth, Reader
from penstock.worker.room import Held, Room

_log = get_logger()


@dataclass(slots=True, eq=False)
class Arriving:
    """One prompt on its way. Its task holds blocks for it, until it is cancelled or its time is up.

    `held` are these, None while there is no room; the first `num_read` of the reserved ones are read and published. `tail`
    is one that is read too, with the tokens past the full blocks; none where that is not so.
    `arrived` is set once no more of it will come.
    """

    request_id: RequestId
    handle: KvHandle
    owner: Hashable
    num_blocks: int
    held: Held | None = None
    num_read: int = 0
    tail: list[BlockId] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def take_tail(self) -> list[BlockId]:
        """Hand `tail` over to the caller, who holds it from now on."""
        tail, self.tail = self.tail, []
        return tail

    def let_go(self) -> None:
        """Stop it, and give up what it holds; what has been published stays in the cache."""
        if self.task is not None:
            self.task.cancel()


class Prefetches:
    """Those of one worker. Its event loop owns them."""

    def __init__(
        self,
        engine: KvBlocks,
        info: EngineInfo,
        config: HandOverConfig,
        *,
        meet: Callable[[KvHandle], Awaitable[Peer]],
        reader: Reader,
        room: Room,
    ) -> None:
        """Fetch nothing yet.

        Args:
            engine: a started one.
            info: what it said of itself.
            config: times and bounds.
            meet: connects to who made a handle.
            reader: reads from them.
            room: for what they have.
        """
        self.fetched_blocks = 0
        self.failures: dict[str, int] = {}
        """Prompts that came in part or not at all, by the error's code."""
        self._engine = engine
        self._takes_tails = isinstance(engine, KvTails)
        self._info = info
        self._config = config
        self._meet = meet
        self._reader = reader
        self._room = room
        self._unclaimed: dict[tuple[RequestId, Hashable], Arriving] = {}  # by request and owner
        self._under_way: set[Arriving] = set()

    def __len__(self) -> int:
        """Count those whose requests have not come."""
        return len(self._unclaimed)

    def begin(self, prefetch: Prefetch, owner: Hashable, tasks: asyncio.TaskGroup) -> None:
        """Fetch a prompt's blocks as they are computed, if there is room; it replaces an older one of the same request.

        Args:
            prefetch: what a frontend says.
            owner: of the request, until `disown`.
            tasks: where it runs.

        Raises:
            Overloaded: as much is held so as may be.
        """
        self.drop(prefetch.request_id, owner)
        hashes = unpack_hashes(prefetch.block_hashes).reshape(-1, 2)
        held = sum(arriving.num_blocks for arriving in self._under_way)
        most = int(self._config.pinned_share_max * self._info.total_blocks)
        if held + len(hashes) > most:
            raise Overloaded(
                f"{held} blocks are held for prompts under way already, and at most {most} may be"
                " (hand_over.pinned_share_max)"
            )
        arriving = Arriving(prefetch.request_id, prefetch.kv, owner, len(hashes))
        self._unclaimed[prefetch.request_id, owner] = arriving
        self._under_way.add(arriving)
        arriving.task = tasks.create_task(self._run(arriving, hashes))
        # one that is cancelled before it began does not get as far as tidying up
        arriving.task.add_done_callback(lambda _: self._end(arriving))

    def claim(self, request_id: RequestId, owner: Hashable, handle: KvHandle) -> Arriving | None:
        """Give what was begun for an owner's request that has come; it is the caller's to let go."""
        arriving = self._unclaimed.pop((request_id, owner), None)
        if arriving is None or _name(arriving.handle) == _name(handle):
            return arriving
        arriving.let_go()
        return None

    def drop(self, request_id: RequestId, owner: Hashable) -> None:
        """Give up what was begun for an owner's request that does not come; no error where there is nothing."""
        arriving = self._unclaimed.pop((request_id, owner), None)
        if arriving is not None:
            arriving.let_go()

    def disown(self, owner: Hashable) -> None:
        """Give up everything of an owner's."""
        for request_id, its_owner in list(self._unclaimed):
            if its_owner is owner:
                self.drop(request_id, owner)

    def give_way(self) -> None:
        """Give up everything whose request has not come: what runs needs the memory."""
        for request_id, owner in list(self._unclaimed):
            self.drop(request_id, owner)

    def close(self) -> None:
        """Give up everything."""
        for arriving in self._under_way:
            arriving.let_go()

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        assert self._under_way.issuperset(self._unclaimed.values()), "what waits for its request is under way"

    def check_idle(self) -> None:
        """Raise AssertionError where anything is left."""
        assert not self._under_way, f"{[one.request_id for one in self._under_way]} are still held"

    # -- one of them

    async def _run(self, arriving: Arriving, hashes: HashArray) -> None:
        try:
            await self._bring(arriving, hashes)
            arriving.arrived.set()
            await asyncio.sleep(arriving.handle.ttl_s)
        except PenstockError as error:
            self._failed(arriving, error)
        except Exception as error:  # noqa: BLE001 - a bug, or a handle that is none, is this prompt's fate alone
            _log.exception("kv_prefetch_failed", request_id=arriving.request_id)
            self._failed(arriving, EngineError(f"{type(error).__name__}: {error}; see the log"))

    async def _bring(self, arriving: Arriving, hashes: HashArray) -> None:
        """Read and publish all that comes, as soon as it does."""
        handle = arriving.handle
        peer = await self._meet(handle)
        with self._reader.following(peer, handle, len(hashes)) as growth:
            is_whole = False
            while not is_whole:
                await self._reader.next_blocks(peer, growth, handle.ttl_s)
                is_whole = growth.is_whole  # while something is read, more of it may be told
                if arriving.held is None:
                    arriving.held = self._room.hold_early(hashes)
                if arriving.held is not None:
                    await self._read(arriving, arriving.held, hashes, peer=peer, growth=growth)
        if arriving.held is None:
            raise Overloaded(f"no room for {len(hashes)} blocks while they were computed")

    async def _read(
        self, arriving: Arriving, held: Held, hashes: HashArray, *, peer: Peer, growth: Growth
    ) -> None:
        """Read the blocks that there are and were not read before, and publish them."""
        (here, reserved), sources = held, growth.block_ids
        start, end = len(here) + arriving.num_read, len(sources)
        if start >= end:
            return
        targets = reserved[arriving.num_read : end - len(here)]
        tail = list(self._engine.reserve(1) or ()) if len(growth.tail) and self._takes_tails else []
        sources = np.concatenate((sources[start:], growth.tail[: len(tail)]))
        try:
            await self._reader.read(peer, arriving.handle, [*targets, *tail], sources, last=PinCheck)
        except BaseException:
            self._engine.unpin(tail)
            raise
        arriving.tail = tail
        self._engine.publish(targets, hashes[start:end], int(hashes[start - 1, 0]) if start else None)
        arriving.num_read += len(targets)
        self.fetched_blocks += len(targets)

    def _failed(self, arriving: Arriving, error: PenstockError) -> None:
        self.failures[error.code] = self.failures.get(error.code, 0) + 1
        _log.debug("kv_not_prefetched", request_id=arriving.request_id, error=error.message)

    def _end(self, arriving: Arriving) -> None:
        """Give back what one held that is over."""
        self._under_way.discard(arriving)
        self._engine.unpin(arriving.take_tail())
        key = arriving.request_id, arriving.owner
        if self._unclaimed.get(key) is arriving:
            del self._unclaimed[key]
        if arriving.held is not None:
            self._room.let_go(arriving.held)
        arriving.arrived.set()


def _name(handle: KvHandle) -> tuple[WorkerId, PinId]:
    return handle.producer, handle.pin_id
