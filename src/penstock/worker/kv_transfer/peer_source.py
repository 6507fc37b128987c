"""A prompt's KV at the prefill worker that computes it, as a `KvSource`."""

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import ChecksumMismatch, EngineError, PenstockError
from penstock.core.ids import BlockId, WorkerId
from penstock.core.log import get_logger
from penstock.core.wire import HashArray, unpack_hashes
from penstock.kv.measured import MeasuredSpeed
from penstock.worker.kv_transfer.reader import Growth, Origin, Reader

_SPEEDS_MAX = 256
"""Workers whose speed is remembered; beyond it the one that was read from longest ago is forgotten."""

_log = get_logger()
_HASH_BYTES = 16
_CHUNK_BYTES = 16 << 20
"""Least of one read: 13 ms over a network of 10 Gbit/s. Each is confirmed by the prefill worker."""
_CHUNKS_MAX = 16
"""Reads of one prompt: each costs both workers messages, however fast the network is."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    task: "asyncio.Task[None]"

    def cancel(self, *, is_late: bool = False) -> None:  # noqa: ARG002 - a late transfer fails its own prompt alone
        """Stop the transfer."""
        self.task.cancel()


class PeerSpeeds:
    """Seconds per block read from other workers, as measured. One event loop owns it."""

    def __init__(self) -> None:
        """Know nothing."""
        self._by_worker: dict[WorkerId, MeasuredSpeed] = {}

    def of(self, worker_id: WorkerId) -> MeasuredSpeed:
        """Give a worker's speed, which all sources of its blocks share."""
        speed = self._by_worker.pop(worker_id, None) or MeasuredSpeed(half_life_s=math.inf)
        if len(self._by_worker) >= _SPEEDS_MAX:
            del self._by_worker[next(iter(self._by_worker))]
        self._by_worker[worker_id] = speed
        return speed


class PeerSource:
    """The blocks of one prompt that its prefill worker pins, as the prefill worker names them. One event loop owns it.

    A load reads blocks one-sided, verifies them, and has the prefill worker confirm that they were pinned all the time. It
    brings all of its blocks or none. After a failed load the source has no blocks any more.

    Attributes:
        hashes: (n, 2) uint64 of the prompt's full blocks.
        tail_hash: (1, 2) uint64, the name of its partial block here; random, since a partial block has no hash.
        growth: the blocks that the prefill worker has named.
        origin: the prefill worker; None before there is a connection.
        error: why a load failed; None if none has.
        num_loaded: full blocks loaded.
        num_corrupt: loads with bytes that did not match their checksum.
    """

    def __init__(
        self, hashes: HashArray, reader: Reader, speed: MeasuredSpeed, *, block_bytes: int = 0
    ) -> None:
        """Make a source without blocks.

        Args:
            hashes: (n, 2) uint64 of the prompt's full blocks.
            reader: reads the blocks.
            speed: seconds per block read from this prefill worker.
            block_bytes: of one block; 0 where engines keep no memory for KV.
        """
        self.chunk_blocks = max(_CHUNK_BYTES // max(block_bytes, 1), -(-len(hashes) // _CHUNKS_MAX), 1)
        self.hashes = hashes
        self.tail_hash = unpack_hashes(secrets.token_bytes(_HASH_BYTES)).reshape(1, 2)
        self.growth = Growth(len(hashes))
        self.origin: Origin | None = None
        self.error: PenstockError | None = None
        self.num_loaded = 0
        self.num_corrupt = 0
        self._reader = reader
        self._speed = speed
        self._waiting_blocks = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_off(self) -> bool:
        """Whether a load has failed."""
        return self.error is not None

    @property
    def names(self) -> HashArray:
        """(m, 2) uint64: the names of the blocks that it has, the partial block last."""
        full = self.hashes[: len(self.growth.block_ids)]
        return np.concatenate((full, self.tail_hash)) if len(self.growth.tail) else full

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that the prefill worker has named."""
        if self.error is not None or not len(block_hashes):
            return 0
        names = self.names
        at = np.flatnonzero((names == block_hashes[0]).all(axis=1))
        if not len(at):
            return 0
        names = names[at[0] :][: len(block_hashes)]
        is_other = (names != block_hashes[: len(names)]).any(axis=1)
        return int(is_other.argmax()) if is_other.any() else len(names)

    def load_s(self, num_blocks: int) -> float:
        """Predict the seconds of a read from this worker; 0 before the first was measured."""
        return self._speed.seconds(num_blocks + self._waiting_blocks)

    def load(self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]) -> _Load:
        """Read blocks that `locate` has counted."""
        names, growth = self.names, self.growth
        first = int(np.flatnonzero((names == block_hashes[0]).all(axis=1))[0])
        blocks = np.concatenate((growth.block_ids, growth.tail))[first : first + len(targets)]
        num_full = min(len(growth.block_ids) - first, len(targets))
        self._waiting_blocks += len(targets)
        task = asyncio.get_running_loop().create_task(self._read(blocks, targets))
        self._tasks.add(task)

        def on_end(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._waiting_blocks -= len(targets)
            is_read = not task.cancelled() and task.exception() is None and self.error is None
            self.num_loaded += num_full if is_read else 0
            done(len(targets) if is_read else 0)

        task.add_done_callback(on_end)
        return _Load(task)

    async def _read(self, blocks: HashArray, targets: Sequence[BlockId]) -> None:
        assert self.origin is not None, "connected"
        assert self.growth.pin_id is not None, "it has blocks"
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            await self._reader.read(self.origin, self.growth.pin_id, targets, blocks)
        except asyncio.CancelledError:  # it was no quicker than this
            self._speed.measure_overlapping(len(targets), begun_s, loop.time())
            raise
        except PenstockError as error:
            self.num_corrupt += isinstance(error, ChecksumMismatch)
            self.error = error
        except Exception as error:  # noqa: BLE001 - a bug or a malformed handle fails this prompt alone
            _log.exception("kv_read_failed", prefill_worker=self.origin.worker_id)
            self.error = EngineError(f"{type(error).__name__}: {error}; see the log")
        else:
            self._speed.measure_overlapping(len(targets), begun_s, loop.time())
