"""Which blocks lead to a prefix that a request can go on after, in a model whose groups of layers need different blocks."""

import math
from collections.abc import Sequence


class _Node:
    """A block of the first group.

    parent: None at the root, and before `is_linked`.
    members: bit set of the other groups that have their block here.
    runs: by group, consecutive blocks that end here, up to what the group needs; at a prompt's begin as many as it needs.
    is_usable: whether no other group lacks a block that a prefix up to here needs.
    support: 1 if it is usable, plus the children that lead on.
    """

    __slots__ = (
        "children", "is_linked", "is_stored", "is_usable", "key", "leads", "members", "parent", "runs", "support",
    )  # fmt: skip

    def __init__(self, key: int, num_groups: int) -> None:
        self.key = key
        self.parent: _Node | None = None
        self.children: dict[int, _Node] = {}
        self.is_linked = self.is_stored = self.is_usable = self.leads = False
        self.members = 0
        self.runs: list[float] = [0.0] * num_groups
        self.support = 0


class ReachableBlocks:
    """Follows what is stored and removed, by the low halves of the prompts' block hashes. Not thread-safe.

    A block leads on if the first group has it, and a prefix that ends with it or goes on from it has all that the other groups
    need. Behind a block that the first group lacks, where no request can go on, it may count as leading nowhere until that block is
    back. To note that a block is stored or removed takes as many steps as the largest window has blocks, at most.
    """

    def __init__(self, needed: Sequence[int | None] = ()) -> None:
        """Begin with nothing.

        Args:
            needed: for each group but the first, last blocks of a prefix that it needs; None: all.
        """
        self._needed = [_most(each) for each in needed]
        self._nodes: dict[int, _Node] = {}
        self._before: dict[int, bool] = {}
        """Blocks that may have changed since `take`: whether they led on before."""

    def __len__(self) -> int:
        """Number of blocks that are known, in any group."""
        return len(self._nodes)

    def add_group(self, needed: int | None) -> None:
        """Add a group that has no blocks yet."""
        self._needed.append(_most(needed))
        ordered = [node for node in self._nodes.values() if node.parent is None]
        for node in ordered:  # which grows: parents before children
            ordered += node.children.values()
            self._before.setdefault(node.key, node.leads)
            node.runs = self._runs(node)
            node.is_usable = self._is_complete(node)
            node.support = int(node.is_usable)
        for node in reversed(ordered):
            node.leads = node.is_stored and node.support > 0
            if node.parent is not None:
                node.parent.support += node.leads

    def store(self, key: int, parent: int | None) -> None:
        """Note that the first group has a block."""
        node = self._node(key)
        node.is_stored = True
        if not node.is_linked:
            node.is_linked = True
            if parent is not None:
                node.parent = self._node(parent)
                node.parent.children[key] = node
            self._extend(node)
        self._note(node)

    def remove(self, key: int) -> None:
        """Note that the first group has a block no more."""
        node = self._nodes.get(key)
        if node is not None:
            node.is_stored = False
            self._note(node)
            self._drop(node)

    def store_other(self, group: int, key: int) -> None:
        """Note that another group, from 0 on, has its block at the place of the first group's block `key`."""
        node = self._node(key)
        node.members |= 1 << group
        self._extend(node)

    def remove_other(self, group: int, key: int) -> bool:
        """Note that another group has it no more; returns whether it had it."""
        node = self._nodes.get(key)
        if node is None or not node.members >> group & 1:
            return False
        node.members &= ~(1 << group)
        self._extend(node)
        self._drop(node)
        return True

    def take(self) -> tuple[list[tuple[int, int | None]], list[int]]:
        """Return the blocks that lead on and did not at the last call, with their parents, and those that no longer do.

        A new block comes after its parent, and next to it where it can.
        """
        removed: list[int] = []
        added: dict[int, _Node] = {}
        for key, before in self._before.items():
            node = self._nodes.get(key)
            leads = node is not None and node.leads
            if before and not leads:
                removed.append(key)
            elif leads and not before:
                assert node is not None
                added[key] = node
        self._before.clear()
        stack = [node for node in added.values() if node.parent is None or node.parent.key not in added]
        ordered: list[tuple[int, int | None]] = []
        while stack:
            node = stack.pop()
            ordered.append((node.key, None if node.parent is None else node.parent.key))
            stack += [child for key, child in node.children.items() if key in added]
        return ordered, removed

    def _node(self, key: int) -> _Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(key, len(self._needed))
        return node

    def _runs(self, node: _Node) -> list[float]:
        if not node.is_linked:
            return [0.0] * len(self._needed)
        before = self._needed if node.parent is None else node.parent.runs
        return [
            min(run + 1, most) if node.members >> group & 1 else 0.0
            for group, (run, most) in enumerate(zip(before, self._needed, strict=True))
        ]

    def _is_complete(self, node: _Node) -> bool:
        return node.is_linked and node.runs == self._needed

    def _extend(self, first: _Node) -> None:
        """Count the runs again that end at a block or after it."""
        stack = [first]
        while stack:
            node = stack.pop()
            runs = self._runs(node)
            if runs == node.runs and node is not first:
                continue
            node.runs = runs
            is_usable = self._is_complete(node)
            if is_usable != node.is_usable:
                node.is_usable = is_usable
                node.support += 1 if is_usable else -1
                self._note(node)
            stack += node.children.values()

    def _note(self, node: _Node | None) -> None:
        """Note whether a block leads on, and those before it."""
        while node is not None:
            leads = node.is_stored and node.support > 0
            if leads == node.leads:
                return
            self._before.setdefault(node.key, node.leads)
            node.leads = leads
            node = node.parent
            if node is not None:
                node.support += 1 if leads else -1

    def _drop(self, node: _Node | None) -> None:
        """Forget a block that nobody has and none continues."""
        while node is not None and not (node.is_stored or node.members or node.children):
            del self._nodes[node.key]
            if node.parent is not None:
                del node.parent.children[node.key]
            node = node.parent


def _most(needed: int | None) -> float:
    return math.inf if needed is None else float(needed)
