"""What a worker has to tell all routers and has not sent yet."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from penstock.core.types.broadcast import RankNews
from penstock.core.types.events import EventBatch


class Outgoing:
    """A `seams.BroadcastSink` with a bound. One event loop owns it."""

    def __init__(self, batches_max: int, *, on_dropped: Callable[[int], None]) -> None:
        """Be empty.

        Args:
            batches_max: of more batches than these, all are dropped.
            on_dropped: called with the number of those dropped.
        """
        self._batches_max = batches_max
        self._on_dropped = on_dropped
        self._batches: defaultdict[int, list[EventBatch]] = defaultdict(list)
        self._num_batches = 0
        self._loads: dict[int, RankNews] = {}
        self._any = asyncio.Event()
        self._urgent = asyncio.Event()

    def push_event(self, rank: int, batch: EventBatch) -> None:
        if self._num_batches >= self._batches_max:
            self._drop_batches()
        self._batches[rank].append(batch)
        self._num_batches += 1
        self._any.set()

    def push_load(self, news: RankNews) -> None:
        self._loads[news.rank] = news
        self._any.set()
        self._urgent.set()

    async def wait(self, linger_s: float) -> None:
        """Wait until there is something, and then for more, unless it is urgent."""
        await self._any.wait()
        try:
            async with asyncio.timeout(linger_s):
                await self._urgent.wait()
        except TimeoutError:
            pass

    def take(self) -> tuple[RankNews, ...]:
        """Remove and return all."""
        ranks = sorted(self._batches.keys() | self._loads.keys())
        news = []
        for rank in ranks:
            load = self._loads.get(rank, RankNews(rank=rank))
            batches = tuple(self._batches.get(rank, ()))
            news.append(RankNews(rank=rank, batches=batches, load=load.load, frontends=load.frontends))
        self._clear()
        return tuple(news)

    def drop(self) -> None:
        """Forget all."""
        self._drop_batches()
        self._clear()

    def _drop_batches(self) -> None:
        self._on_dropped(self._num_batches)
        self._batches.clear()
        self._num_batches = 0

    def _clear(self) -> None:
        self._batches.clear()
        self._num_batches = 0
        self._loads.clear()
        self._any.clear()
        self._urgent.clear()
