"""The prefix cache of one simulated worker: KV blocks of ended requests in the room that running ones leave."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.sim.trace import PREFIX_BLOCK_TOKENS


@dataclass(slots=True)
class PrefixCache:
    """Block ids in the order of their last use. An id stands for its block and all before it."""

    _blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._blocks)

    def cached_tokens(self, ids: Sequence[int], tokens: int) -> int:
        """Give the leading tokens of a prompt that are cached; its last token never is."""
        blocks = self._blocks
        count = 0
        for each in ids:
            if each not in blocks:
                break
            count += 1
        return min(count * PREFIX_BLOCK_TOKENS, tokens - 1)

    def use(self, ids: Sequence[int]) -> None:
        """Make blocks the last to be evicted, and add those that are not there; later blocks go before earlier ones."""
        blocks = self._blocks
        for each in reversed(ids):
            blocks[each] = None
            blocks.move_to_end(each)

    def shrink(self, room_tokens: int) -> None:
        """Evict until the blocks find room."""
        most = max(0, room_tokens // PREFIX_BLOCK_TOKENS)
        blocks = self._blocks
        while len(blocks) > most:
            blocks.popitem(last=False)
