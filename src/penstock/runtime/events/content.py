"""The content of one worker's caches: copies of each block by tier, and each block's parent."""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from penstock.core.native import native
from penstock.core.types.events import COPIES_MAX, Copies, Tier
from penstock.core.wire import Hashes, PackedHashes, hash_list, pack_hashes

__all__ = ["Content", "ContentPython"]

Runs = list[tuple[PackedHashes, int | None, Copies]]
"""Chains of blocks with equal copies by tier: (hashes, parent of the first, copies)."""

_TIERS = tuple(Tier)
_ALL = 1 << 62


class Walk(Protocol):
    """An incremental iteration over a worker's content as of one moment, parents before children.

    Later changes of the content do not affect it.
    """

    @property
    def is_done(self) -> bool: ...

    def next(self, steps: int) -> Runs:
        """Visit up to `steps` more blocks and return their runs."""
        ...


class _Content(Protocol):
    def walk(self) -> Walk: ...


class ContentCalls:
    """Methods shared by the native content and its Python reference."""

    def runs(self: _Content) -> Runs:
        """Return the whole content at once."""
        return self.walk().next(_ALL)


class ContentWalkPython:
    """Python reference of the native walk; it copies everything when it begins."""

    def __init__(self, runs: Runs) -> None:
        self._blocks = _single(runs)
        self._left = sum(len(hashes) // 8 for hashes, _, _ in runs)

    @property
    def is_done(self) -> bool:
        return not self._left

    def next(self, steps: int) -> Runs:
        runs: Runs = []
        for block_hash, parent, copies in islice(self._blocks, min(steps, self._left)):
            self._left -= 1
            if runs and runs[-1][0][-8:] == parent and runs[-1][2] == copies:
                runs[-1] = (PackedHashes(runs[-1][0] + block_hash), *runs[-1][1:])
            else:
                runs.append(
                    (block_hash, None if parent is None else int.from_bytes(parent, "little"), copies)
                )
        return runs


class ContentPython(ContentCalls):
    """Python reference of the native content: a plain map, without a prefix index. One task owns it.

    Engines may store equal blocks several times and remove each copy separately, so copies are counted, up to 4,095 of a
    block in a tier. A hash names its whole prefix, so a block's parent never changes.
    """

    def __init__(self) -> None:
        self.unknown_removals = 0
        """Removed blocks that were not held; each is a bookkeeping error of the engine."""
        self._copies: dict[int, Copies] = {}
        self._parents: dict[int, int | None] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def store(self, hashes: Hashes, parent: int | None, tier: Tier) -> None:
        """Add a copy of each block of a chain; `parent` is the first one's parent."""
        for block_hash in hash_list(hashes):
            copies = self._copies.get(block_hash)
            if copies is None:
                copies, self._parents[block_hash] = (0,) * len(_TIERS), parent
            self._copies[block_hash] = _changed(copies, tier, +1)
            parent = block_hash

    def remove(self, hashes: Hashes, tier: Tier) -> None:
        """Remove a copy of each block; blocks that are not held only count in `unknown_removals`."""
        for block_hash in hash_list(hashes):
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
        """Remove everything."""
        self._copies.clear()
        self._parents.clear()

    def walk(self) -> Walk:
        """Begin an iteration over the current content."""
        return ContentWalkPython(self._all_runs())

    def _all_runs(self) -> Runs:
        runs: list[tuple[list[int], int | None, Copies]] = []
        parents, visited = self._parents, dict.fromkeys(self._parents, False)
        ends = self._parents.keys() - set(self._parents.values())
        for end in (*ends, *self._parents):  # the latter reach blocks whose parents form a cycle
            path: list[int] = []
            at: int | None = end
            while at is not None and visited.get(at) is False:
                visited[at] = True
                path.append(at)
                at = parents[at]
            for block_hash in reversed(path):
                parent, copies = parents[block_hash], self._copies[block_hash]
                if not runs or parent != runs[-1][0][-1] or copies != runs[-1][2]:
                    runs.append(([], parent, copies))
                runs[-1][0].append(block_hash)
        return [(pack_hashes(hashes), parent, copies) for hashes, parent, copies in runs]

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert self._copies.keys() == self._parents.keys(), (
            "content: each block has a parent or is a first one"
        )
        for block_hash, copies in self._copies.items():
            assert any(copies), f"content: block {block_hash:x} is kept without copies"
            assert all(0 <= count <= COPIES_MAX for count in copies), (
                f"content: block {block_hash:x}: {copies}"
            )


def _single(runs: Runs) -> Iterator[tuple[PackedHashes, bytes | None, Copies]]:
    """Yield (hash, parent, copies) of each block of the runs."""
    for hashes, first_parent, copies in runs:
        parent = None if first_parent is None else first_parent.to_bytes(8, "little")
        for at in range(0, len(hashes), 8):
            block_hash = PackedHashes(hashes[at : at + 8])
            yield block_hash, parent, copies
            parent = block_hash


def _changed(copies: Copies, tier: Tier, by: int) -> Copies:
    at = _TIERS.index(tier)
    return (*copies[:at], min(copies[at] + by, COPIES_MAX), *copies[at + 1 :])


if TYPE_CHECKING or native is None:
    Content = ContentPython
else:

    class Content(ContentCalls, native.Content):
        """Does what its reference says."""

        __doc__ = ContentPython.__doc__
