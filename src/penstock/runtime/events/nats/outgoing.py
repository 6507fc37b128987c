"""What a worker has to tell all routers and has not sent yet."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from penstock.core.types.broadcast import RankNews
from penstock.core.types.events import EventBatch


class Outgoing:
    """A `seams.BroadcastSink` with a bound. One event loop owns it."""

    def __init__(self, batches_max: int, *, linger_s: float, on_dropped: Callable[[int], None]) -> None:
        """Be empty.

        Args:
            batches_max: of more batches than these, all are dropped.
            linger_s: how long a batch waits for more; a load report ends the wait.
            on_dropped: called with the number of those dropped.
        """
        self._batches_max = batches_max
        self._linger_s = linger_s
        self._on_dropped = on_dropped
        self._batches: defaultdict[int, list[EventBatch]] = defaultdict(list)
        self._num_batches = 0
        self._loads: dict[int, RankNews] = {}
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        """Of the oldest batch."""

    def push_event(self, rank: int, batch: EventBatch) -> None:
        if self._num_batches >= self._batches_max:
            self._drop_batches()
        self._batches[rank].append(batch)
        self._num_batches += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._due.set)

    def push_load(self, news: RankNews) -> None:
        self._loads[news.rank] = news
        self._due.set()

    async def wait(self) -> None:
        """Wait until something is to be sent."""
        await self._due.wait()

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
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
