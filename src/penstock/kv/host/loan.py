"""Blocks of the host tier that another host reads where they are.

Own blocks are held meanwhile. Those of other workers' extents are not, as for any reader of the arena: their records tell
afterwards whether they were overwritten.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.kv.lent import LENT_BLOCK
from penstock.kv.host.copies import HostLoad

_CHECKED_MAX = 64
"""Blocks of one loan that are checked on a reader's word; each takes the time of reading it."""


class _Tier(Protocol):
    """What a loan asks of its `HostTier`, which says what each does."""

    def memory(self) -> list[NDArray[np.uint8]]: ...

    def hold(self, load: HostLoad) -> None: ...

    def let_go(self, load: HostLoad) -> None: ...

    def count_unchanged(self, load: HostLoad) -> int: ...

    def recheck(self, load: HostLoad, indexes: Sequence[int], done: Callable[[], None]) -> None: ...


class HostLoan:
    """A `KvLoan` of a `HostTier`. One event loop owns it."""

    def __init__(self, tier: _Tier, load: HostLoad, number: int) -> None:
        """Hold the blocks.

        Args:
            tier: has them.
            load: says where they are; at least one block.
            number: of the tier's own extent.
        """
        self._tier = tier
        self._load = load
        self.blocks = np.zeros(len(load.targets), LENT_BLOCK)
        self.blocks["sum"] = load.records["data_sum"]
        bases = [memory.ctypes.data for memory in tier.memory()]
        at = 0
        for piece in load.pieces:
            end = at + len(piece.slots)
            extent = number if piece.sibling is None else piece.sibling.number
            self.blocks["region"][at:end] = extent
            self.blocks["offset"][at:end] = load.sources[at:end] - np.uint64(bases[extent])
            at = end
        tier.hold(load)

    @property
    def is_intact(self) -> bool:
        """Whether no block of another worker was overwritten so far; own ones cannot be."""
        return self._tier.count_unchanged(self._load) == len(self.blocks)

    def end(self, wrong: Sequence[int] = ()) -> None:
        """Let go of the blocks, once those that arrived wrong were checked."""
        known = [index for index in dict.fromkeys(wrong) if 0 <= index < len(self.blocks)][:_CHECKED_MAX]
        if known:
            self._tier.recheck(self._load, known, self._let_go)
        else:
            self._let_go()

    def _let_go(self) -> None:
        self._tier.let_go(self._load)
