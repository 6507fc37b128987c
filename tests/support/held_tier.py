"""A KV tier whose copies end when a test says so."""

from collections.abc import Callable, Iterable, Sequence

from penstock.core.ids import BlockId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.wire import HashArray


class HeldLoad:
    """A load that ends by `end`."""

    def __init__(self, targets: Sequence[BlockId], done: Callable[[int], None]) -> None:
        self.targets = list(targets)
        self.is_cancelled = self.is_late = False
        self._done = done

    def cancel(self, *, is_late: bool = False) -> None:
        self.is_cancelled, self.is_late = True, is_late

    def end(self, count: int | None = None) -> None:
        """End with so many blocks; None is all."""
        self._done(len(self.targets) if count is None else count)


class HeldTier:
    """Keeps hashes and no bytes."""

    tier = Tier.HOST
    num_blocks = 1_000
    shared = None
    block_bytes = 32
    num_corrupt = 0
    is_off = False
    is_weighed = True
    offload_room = 1_000
    chunk_blocks = 1_000

    def __init__(
        self,
        keys: Iterable[int] = (),
        seconds_per_block: float = 0.0,
    ) -> None:
        self.keys = set(keys)
        self.storing: set[int] = set()
        self.loads: list[HeldLoad] = []
        self.offloads: list[tuple[list[int], list[BlockId], Callable[[Sequence[BlockId]], None]]] = []
        self.seconds_per_block = seconds_per_block
        self.is_closed = False
        self.broken: Exception | None = None
        """What `load` raises."""
        self.refuses_after: int | None = None
        """New blocks that an offload takes; None takes all."""

    def probe(self) -> float | None:
        return None

    def start(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change

    @property
    def num_cached(self) -> int:
        return len(self.keys)

    def locate(self, block_hashes: HashArray) -> int:
        count = 0
        for low, _ in block_hashes.tolist():
            if low not in self.keys:
                break
            count += 1
        return count

    def load_s(self, num_blocks: int) -> float:
        return num_blocks * self.seconds_per_block

    def load(
        self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]
    ) -> HeldLoad:
        assert len(block_hashes) == len(targets)
        if self.broken is not None:
            raise self.broken
        self.loads.append(HeldLoad(targets, done))
        return self.loads[-1]

    def offload(
        self, block_hashes: HashArray, block_ids: Sequence[BlockId], done: Callable[[Sequence[BlockId]], None]
    ) -> Sequence[BlockId]:
        lows = block_hashes[:, 0].tolist()
        there = self.keys | self.storing
        taken = [(low, block_id) for low, block_id in zip(lows, block_ids, strict=True) if low not in there]
        taken = taken[: self.refuses_after]
        read = [block_id for _, block_id in taken]
        if read:
            self.offloads.append(([low for low, _ in taken], read, done))
            self.storing.update(low for low, _ in taken)
        return read

    def end_offload(self) -> None:
        """End the oldest offload."""
        lows, read, done = self.offloads.pop(0)
        self.keys.update(lows)
        self.storing.difference_update(lows)
        done(read)

    def take_events(self) -> tuple[KvEvent, ...]:
        return ()

    def clear(self) -> None:
        self.keys.clear()

    async def close(self) -> None:
        self.is_closed = True
