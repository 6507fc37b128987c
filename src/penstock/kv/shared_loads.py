"""Loads under way, and the requests that wait for each: one load serves all requests that need its blocks."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from penstock.core.ids import RequestId
from penstock.core.wire import HashArray

_Waiter = TypeVar("_Waiter")
_Work = TypeVar("_Work")


@dataclass(slots=True, eq=False)
class SharedLoad(Generic[_Waiter, _Work]):
    """A load under way.

    Attributes:
        hashes: (n, 2) uint64, of the blocks that it loads.
        num_before: blocks of the prompt before these.
        begun_for: the request that it was begun for.
        waiters: by request; a load for which nobody waits is to be cancelled, and nobody joins it.
        work: what loads, once it has begun.
    """

    hashes: HashArray
    num_before: int
    begun_for: RequestId
    waiters: dict[RequestId, _Waiter] = field(default_factory=dict)
    work: _Work | None = None

    def count_brought(self, block_hashes: HashArray, num_before: int) -> int:
        """Count the leading blocks of `block_hashes`, before which a prompt has `num_before`, that this load brings."""
        start = num_before - self.num_before
        if not self.waiters or not 0 <= start < len(self.hashes):
            return 0
        count = min(len(block_hashes), len(self.hashes) - start)
        is_other = (block_hashes[:count] != self.hashes[start : start + count]).any(axis=1)
        return int(np.argmax(is_other)) if is_other.any() else count


class SharedLoads(Generic[_Waiter, _Work]):
    """The loads of one worker, in the order in which they were begun. One task owns it."""

    def __init__(self) -> None:
        self._loads: dict[SharedLoad[_Waiter, _Work], None] = {}
        self._awaited: dict[RequestId, SharedLoad[_Waiter, _Work]] = {}

    def __len__(self) -> int:
        """Count the loads."""
        return len(self._loads)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._awaited)

    def all(self) -> tuple[SharedLoad[_Waiter, _Work], ...]:
        """Return the loads."""
        return tuple(self._loads)

    def find(self, block_hashes: HashArray, num_before: int) -> SharedLoad[_Waiter, _Work] | None:
        """Find a load that brings the first of `block_hashes`, before which a prompt has `num_before` blocks."""
        if not len(block_hashes):
            return None
        return next((load for load in self._loads if load.count_brought(block_hashes[:1], num_before)), None)

    def begin(self, load: SharedLoad[_Waiter, _Work]) -> None:
        """Add a load that begins."""
        self._loads[load] = None

    def join(self, load: SharedLoad[_Waiter, _Work], request_id: RequestId, waiter: _Waiter) -> None:
        """Have a request wait for a load; it waits for no other."""
        assert request_id not in self._awaited, "a request waits for one load"
        load.waiters[request_id] = waiter
        self._awaited[request_id] = load

    def leave(self, request_id: RequestId) -> SharedLoad[_Waiter, _Work] | None:
        """Have a request wait no longer; return the load that it waited for, if there is one."""
        load = self._awaited.pop(request_id, None)
        if load is not None:
            del load.waiters[request_id]
        return load

    def end(self, load: SharedLoad[_Waiter, _Work]) -> dict[RequestId, _Waiter]:
        """Remove a load that has ended, and return who waited for it."""
        del self._loads[load]
        waiters, load.waiters = load.waiters, {}
        for request_id in waiters:
            del self._awaited[request_id]
        return waiters

    def check_idle(self) -> None:
        """Raise AssertionError if a load is left."""
        assert not self._awaited, f"{list(self._awaited)} still wait for loads"
        assert not self._loads, f"{len(self._loads)} loads are under way"
