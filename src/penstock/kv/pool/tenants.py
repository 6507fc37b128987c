"""Python reference of the native `Tenants`: counts idle blocks by the tenant whose request used them last."""

from collections import Counter, OrderedDict, defaultdict
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

from penstock.core.ids import BlockId

NOBODY = 0
"""Owner of blocks that no request has used to its end."""


class Tenants:
    """Says whose blocks go first: those of a tenant with more idle blocks than it may have."""

    def __init__(self, most: int) -> None:
        """Allow each tenant `most` idle blocks."""
        self._most = most
        self._owner: dict[BlockId, int] = {}
        self._num_idle: Counter[int] = Counter()
        self._leaves: defaultdict[int, OrderedDict[BlockId, None]] = defaultdict(OrderedDict)
        """Like `_num_idle`, only of tenants that have some."""

    def own(self, block_id: BlockId, tenant: int) -> None:
        """A held block is a tenant's from now on."""
        self._owner[block_id] = tenant

    def enter_idle(self, block_id: BlockId) -> None:
        self._num_idle[self._owner[block_id]] += 1

    def leave_idle(self, block_id: BlockId) -> None:
        tenant = self._owner[block_id]
        self._num_idle[tenant] -= 1
        if not self._num_idle[tenant]:
            del self._num_idle[tenant]

    def add_leaf(self, block_id: BlockId) -> None:
        """The idle block may go."""
        self._leaves[self._owner[block_id]][block_id] = None

    def remove_leaf(self, block_id: BlockId) -> None:
        leaves = self._leaves[self._owner[block_id]]
        del leaves[block_id]
        if not leaves:
            del self._leaves[self._owner[block_id]]

    def sample(self, most: int) -> list[BlockId]:
        """Give up to so many leaves of the tenant with the most idle blocks past its share, and put them behind its others."""
        leaves = self._over()
        sample = list(islice(leaves, most))
        for block_id in sample:
            leaves.move_to_end(block_id)
        return sample

    def first(self) -> BlockId | None:
        """Give the first leaf of that tenant, without a change; None if nobody has too many."""
        return next(iter(self._over()), None)

    def _over(self) -> "OrderedDict[BlockId, None]":
        over = [
            (-count, tenant)
            for tenant, count in self._num_idle.items()
            if tenant != NOBODY and count > self._most
        ]
        return self._leaves.get(min(over)[1], OrderedDict()) if over else OrderedDict()

    def reset(self) -> None:
        self._owner.clear()
        self._num_idle.clear()
        self._leaves.clear()


@lru_cache(maxsize=4096)
def tenant_number(name: str) -> int:
    """Return the 64-bit number of a tenant's name, never NOBODY."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1
