"""KV events of a model with several groups of layers: a block is told while it leads to a prefix that can be used."""

from collections.abc import Sequence

from penstock.core.types.events import BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import pack_hashes
from penstock.kv.groups.reachable import ReachableBlocks


class ToldBlocks:
    """What one worker keeps in each tier, by the low halves of its prompts' block hashes. Not thread-safe.

    Routers count the leading blocks of a prompt that a worker was told to have. So a block of the first group is told once a
    prefix with it has all that other groups need, and is told removed when none has.
    """

    def __init__(self, block_size: int, needed: Sequence[int | None] = ()) -> None:
        """Begin with nothing.

        Args:
            block_size: tokens in a block.
            needed: for each group but the first, last blocks of a prefix that it needs; None: all.
        """
        self._block_size = block_size
        self._needed = list(needed)
        self._tiers: dict[Tier, ReachableBlocks] = {}

    def add_group(self, needed: int | None) -> None:
        """Add a group that has no blocks yet."""
        self._needed.append(needed)
        for blocks in self._tiers.values():
            blocks.add_group(needed)

    def of(self, tier: Tier) -> ReachableBlocks:
        """Return the blocks of a tier, to note changes of them."""
        blocks = self._tiers.get(tier)
        if blocks is None:
            blocks = self._tiers[tier] = ReachableBlocks(self._needed)
        return blocks

    def forget(self, tier: Tier) -> None:
        """Forget all blocks of a tier, which are told to be cleared."""
        self._tiers.pop(tier, None)

    def take(self) -> list[KvEvent]:
        """Return the events of what has changed since the last call: stored blocks first, those of the lowest tier before."""
        stored: list[KvEvent] = []
        removed: list[KvEvent] = []
        for tier in reversed(Tier):
            if (blocks := self._tiers.get(tier)) is None:
                continue
            added, gone = blocks.take()
            stored += self._stored(added, tier)
            if gone:
                removed.append(BlockRemoved(block_hashes=pack_hashes(gone), tier=tier))
        return stored + removed

    def _stored(self, added: Sequence[tuple[int, int | None]], tier: Tier) -> list[KvEvent]:
        events: list[KvEvent] = []
        run: list[int] = []
        run_parent: int | None = None
        for key, parent in [*added, (0, None)]:
            if run and (parent is None or parent != run[-1]):
                events.append(
                    BlockStored(
                        block_hashes=pack_hashes(run),
                        parent_block_hash=run_parent,
                        block_size=self._block_size,
                        tier=tier,
                    )
                )
                run = []
            if not run:
                run_parent = parent
            run.append(key)
        return events
