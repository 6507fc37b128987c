"""What one worker holds: the copies of each block by tier, and the block before it."""

from typing import TYPE_CHECKING

from penstock.core.native import native
from penstock.core.radix_calls import Copies, Hashes
from penstock.core.radix_twin import COPIES_MAX, as_list
from penstock.core.types import Tier
from penstock.core.wire import PackedHashes, pack_hashes

__all__ = ["Content", "ContentPython"]

_TIERS = tuple(Tier)


class ContentPython:
    """A map and nothing beside it, as nobody looks for prefixes here. One task owns it.

    Engines may store equal blocks more than once and remove each copy on its own, so that copies count; beyond 4,095
    of a block in a tier, further ones do not. A hash names its whole prefix, so that its parent never changes.
    """

    def __init__(self) -> None:
        self.unknown_removals = 0
        """Blocks removed that were not held: the engine's bookkeeping is off by as many."""
        self._copies: dict[int, Copies] = {}
        self._parents: dict[int, int | None] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def store(self, hashes: Hashes, parent: int | None, tier: Tier) -> None:
        """Note one more copy of each block, each the parent of the next; `parent` is before the first."""
        for block_hash in as_list(hashes):
            copies = self._copies.get(block_hash)
            if copies is None:
                copies, self._parents[block_hash] = (0,) * len(_TIERS), parent
            self._copies[block_hash] = _changed(copies, tier, +1)
            parent = block_hash

    def remove(self, hashes: Hashes, tier: Tier) -> None:
        """Note one copy less of each block; those not held are counted and otherwise ignored."""
        for block_hash in as_list(hashes):
            copies = self._copies.get(block_hash)
            if copies is None or not copies[_TIERS.index(tier)]:
                self.unknown_removals += 1
                continue
            left = _changed(copies, tier, -1)
            if any(left):
                self._copies[block_hash] = left
            else:
                del self._copies[block_hash], self._parents[block_hash]

    def clear(self) -> None:
        """Forget all of it."""
        self._copies.clear()
        self._parents.clear()

    def runs(self) -> list[tuple[PackedHashes, int | None, Copies]]:
        """Give chains of blocks held alike, parents before children: hashes, parent, copies by tier."""
        runs: list[tuple[list[int], int | None, Copies]] = []
        parents, said = self._parents, dict.fromkeys(self._parents, False)
        ends = self._parents.keys() - set(self._parents.values())
        for end in (*ends, *self._parents):  # the latter reach those whose parents go in a circle
            path: list[int] = []
            at: int | None = end
            while at is not None and said.get(at) is False:
                said[at] = True
                path.append(at)
                at = parents[at]
            for block_hash in reversed(path):
                parent, copies = parents[block_hash], self._copies[block_hash]
                if not runs or parent != runs[-1][0][-1] or copies != runs[-1][2]:
                    runs.append(([], parent, copies))
                runs[-1][0].append(block_hash)
        return [(pack_hashes(hashes), parent, copies) for hashes, parent, copies in runs]

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert self._copies.keys() == self._parents.keys(), (
            "content: each block has a parent or is a first one"
        )
        for block_hash, copies in self._copies.items():
            assert any(copies), f"content: block {block_hash:x} is kept without copies"
            assert all(0 <= count <= COPIES_MAX for count in copies), (
                f"content: block {block_hash:x}: {copies}"
            )


def _changed(copies: Copies, tier: Tier, by: int) -> Copies:
    at = _TIERS.index(tier)
    return (*copies[:at], min(copies[at] + by, COPIES_MAX), *copies[at + 1 :])


if TYPE_CHECKING or native is None:  # noqa: SIM108 - a type, for mypy
    Content = ContentPython
else:
    Content = native.Content
