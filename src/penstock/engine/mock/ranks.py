"""Mock engines side by side as the data-parallel ranks of one engine: each has a queue, a batch, blocks and steps of its own."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from msgspec.structs import replace

from penstock.core.ids import RequestId
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Request
from penstock.engine.mock.engine import MockEngine


class MockRanks:
    """Implements `Engine`, `Announcing` and `Sleeping` over one mock engine for each rank. One event loop owns it.

    Real ranks with shared experts step together; these do not wait for each other. They transfer no KV.
    """

    def __init__(self, ranks: Sequence[MockEngine]) -> None:
        """Make an engine of ranks that are not started."""
        self._ranks = ranks
        self._rank_of: dict[RequestId, int] = {}
        """Of requests that have not ended."""
        self._steps: asyncio.Queue[Step | Exception | None] = asyncio.Queue(maxsize=len(ranks))

    async def start(self) -> EngineInfo:
        """Start all ranks; gives the sizes of one.

        Raises:
            ConfigError: a setting cannot work.
        """
        info, *_ = [await rank.start() for rank in self._ranks]
        return replace(info, data_parallel=len(self._ranks), kv_layout=None)

    def submit(self, request: Request) -> None:
        """Queue a request at its rank; one without a rank goes to the rank with the fewest."""
        rank = self._rank_of.get(
            request.request_id, request.rank
        )  # a rank refuses an id that is under way there
        if rank is None:
            counts = Counter(self._rank_of.values())
            rank = min(range(len(self._ranks)), key=counts.__getitem__)
        self._ranks[rank].submit(request)
        self._rank_of[request.request_id] = rank

    def abort(self, request_id: RequestId) -> None:
        rank = self._rank_of.pop(request_id, None)
        if rank is not None:
            self._ranks[rank].abort(request_id)

    async def steps(self) -> AsyncIterator[Step]:
        """Yield the steps of all ranks as they come, until `close`.

        Raises:
            EngineError: a rank's steps failed too often: all end.
        """
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run(number)) for number in range(len(self._ranks))]
            try:
                while (item := await self._steps.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    for delta in item.deltas:
                        if delta.finish_reason is not None:
                            self._rank_of.pop(delta.request_id, None)
                    yield replace(item, load=self.load())
            finally:
                for each in running:
                    each.cancel()

    def announce(self, listener: Callable[[Sequence[RequestId]], None]) -> None:
        for rank in self._ranks:
            rank.announce(listener)

    def load(self) -> WorkerLoad:
        return WorkerLoad.of_ranks([rank.load() for rank in self._ranks])

    def check_sleep(self, level: int) -> None:
        """Sleep at every level."""

    async def sleep(self, level: int) -> None:
        for rank in self._ranks:
            await rank.sleep(level)

    async def wake_up(self) -> None:
        """Have nothing to take again."""

    async def close(self) -> None:
        for rank in self._ranks:
            await rank.close()

    async def _run(self, number: int) -> None:
        """Pass on the steps of one rank, and at their end what ended them; None: it was closed."""
        end: Exception | None = None
        try:
            async for step in self._ranks[number].steps():
                await self._steps.put(replace(step, rank=number))
        except Exception as error:  # noqa: BLE001 - the reader of the steps gets it
            end = error
        await self._steps.put(end)
