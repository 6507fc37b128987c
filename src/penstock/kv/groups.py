"""Groups of layers that have KV blocks of their own, and which prefixes of a prompt all groups have."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.core.types.events import (
    SHARED_HOLDER,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Holder,
    KvEvent,
    Tier,
)
from penstock.core.wire import HashArray, hash_list, pack_hashes


class GroupKind(StrEnum):
    """Which tokens a group's layers attend to, by the names of vLLM's KV events."""

    FULL = "full_attention"
    MLA = "mla_attention"
    SLIDING_WINDOW = "sliding_window"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one table of blocks.

    Attributes:
        kind: of their attention; MLA needs the same blocks as full attention, and has fewer bytes.
        layers: their names.
        bytes_per_token: KV of one token in all of these layers.
        window_tokens: a token attends to so many, itself included; None: to all before it.
    """

    kind: GroupKind
    layers: tuple[str, ...]
    bytes_per_token: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.SLIDING_WINDOW) != (self.window_tokens is not None):
            raise ValueError(
                f"window_tokens: {self.window_tokens} for {self.kind}; expected one for a sliding window alone"
            )

    def needed_blocks(self, block_size: int) -> int | None:
        """Count the last blocks of a prefix that have to be there before the next token; None: all of them."""
        return None if self.window_tokens is None else -(-(self.window_tokens - 1) // block_size)


@dataclass(frozen=True, slots=True)
class Place:
    """One group, in the order in which blocks at one position of a prompt hang on each other.

    Attributes:
        group: its number in the engine.
        needed: last blocks of a prefix that it needs; None: all.
        mask: (2,) uint64 that makes a prompt's block hash the name of this group's block.
    """

    group: int
    needed: int | None
    mask: NDArray[np.uint64]

    def names(self, block_hashes: HashArray) -> HashArray:
        """Name this group's blocks: (n, 2) uint64, as the hashes of the prompt's blocks."""
        return block_hashes ^ self.mask

    def start(self, end: int) -> int:
        """Return the first block that a prefix of `end` blocks needs."""
        return 0 if self.needed is None else max(0, end - self.needed)


class KvGroups:
    """The groups of one model, whose blocks all have `block_size` tokens.

    Groups over the whole context come first, then windows, the largest first. So at every position of a prompt the groups that
    keep a block are the leading ones. The first group's blocks have the prompt's own hashes, and are the parents in a tier:
    the blocks of one position are a chain that begins with the first group's.
    """

    def __init__(self, groups: Sequence[KvGroup], block_size: int) -> None:
        """Order the groups.

        Args:
            groups: in the engine's order, at least one.
            block_size: tokens in a block of every group.
        """
        needed = [group.needed_blocks(block_size) for group in groups]
        order = sorted(range(len(groups)), key=lambda number: _whole_first(needed[number]))
        self.places = tuple(Place(number, needed[number], _mask(place)) for place, number in enumerate(order))
        self.others = self.places[1:]
        """All but the first."""
        self.is_one_table = not self.others and self.places[0].needed is None
        """Whether every leading block of a prefix is of use."""

    def ends(self, num_leading: int, held: Sequence[NDArray[np.bool_]]) -> NDArray[np.intp]:
        """Return the lengths of all prefixes that are held, ascending, in blocks: a request can go on after each.

        Blocks before the first one here count as held, in groups with a window too.

        Args:
            num_leading: blocks of the first group that are held, from the first on.
            held: for each of the other groups, (num_leading,) whether each block is held.
        """
        lengths = np.arange(num_leading + 1)
        usable = np.ones(num_leading + 1, np.bool_)
        for place, has in zip(self.others, held, strict=True):
            missing = np.concatenate([[0], np.cumsum(~has)])
            first = lengths * 0 if place.needed is None else np.maximum(lengths - place.needed, 0)
            usable &= missing[lengths] == missing[first]
        return np.flatnonzero(usable)

    def to_load(self, end: int) -> list[tuple[Place, range]]:
        """Return the blocks that a prefix of `end` blocks takes, by group."""
        return [(place, range(place.start(end), end)) for place in self.places]

    def chain(self, block_hash: HashArray, places: Sequence[Place]) -> HashArray:
        """Name the blocks of one position: the first group's, and those of `places`, its next ones.

        Args:
            block_hash: (1, 2) uint64 of the prompt's block.
            places: leading ones of `others`.
        """
        return np.concatenate([block_hash, *(place.names(block_hash) for place in places)])

    def place_of(self, block_hash: int, parent: int | None) -> int:
        """Return which group's a stored block is, by the low halves of its name and its parent's; 0: the first group's."""
        if parent is None:
            return 0
        between = block_hash ^ parent
        before = 0
        for number, place in enumerate(self.others, 1):
            low = int(place.mask[0])
            if between == before ^ low:
                return number
            before = low
        return 0


def _whole_first(needed: int | None) -> float:
    return float("-inf") if needed is None else -needed


def _mask(place: int) -> NDArray[np.uint64]:
    if not place:
        return np.zeros(2, np.uint64)
    digest = hashlib.blake2b(f"penstock kv group {place}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


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


_TIER_OF = {holder: tier for tier, holder in SHARED_HOLDER.items()}


class GroupEvents:
    """Turns events that name blocks of all groups into events of the prompts' blocks. Not thread-safe."""

    def __init__(self, groups: KvGroups, block_size: int) -> None:
        """Begin with nothing.

        Args:
            groups: of the model.
            block_size: tokens in a block.
        """
        self._groups = groups
        self._masks = [int(place.mask[0]) for place in groups.others]
        self._told = ToldBlocks(block_size, [place.needed for place in groups.others])
        self._holders: dict[Tier, Holder] = {}
        """Who keeps a tier's blocks, where it is not the worker alone."""

    def translate(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Note events of all tiers, and return what routers are told."""
        if not self._masks:
            return list(events)
        out: list[KvEvent] = []
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    for tier in self._tiers_of(event.holder):
                        self._told.forget(tier)
                    out.append(event)
        return out + [self._held(event) for event in self._told.take()]

    def _held(self, event: KvEvent) -> KvEvent:
        """Note in an event who holds its blocks."""
        if isinstance(event, AllBlocksCleared) or event.tier not in self._holders:
            return event
        return replace(event, holder=self._holders[event.tier])

    def _tiers_of(self, holder: Holder) -> list[Tier]:
        if holder is not Holder.WORKER:
            return [_TIER_OF[holder]]
        return [tier for tier in Tier if tier not in self._holders]

    def _of(self, event: BlockStored | BlockRemoved) -> ReachableBlocks:
        if event.holder is not Holder.WORKER:
            self._holders[event.tier] = event.holder
        return self._told.of(event.tier)

    def _store(self, event: BlockStored) -> None:
        blocks = self._of(event)
        parent = event.parent_block_hash
        for each in hash_list(event.block_hashes):
            place = self._groups.place_of(each, parent)
            if place:
                blocks.store_other(place - 1, each ^ self._masks[place - 1])
            else:
                blocks.store(each, parent)
            parent = each

    def _remove(self, event: BlockRemoved) -> None:
        blocks = self._of(event)
        for each in hash_list(event.block_hashes):
            if not any(blocks.remove_other(group, each ^ mask) for group, mask in enumerate(self._masks)):
                blocks.remove(each)


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding windows of a model in which other layers attend to the whole context.

    A block of the pool has the KV of `block_size` tokens in the layers over the whole context. Layers with a window take
    blocks of the same bytes, as many as their number makes of it.

    layers:       (window in tokens, number of layers with it) for each size of window; empty: the model has one table
    whole_layers: layers over the whole context
    """

    layers: tuple[tuple[int, int], ...] = ()
    whole_layers: int = 1

    def blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Count the blocks of a request's windows.

        Args:
            tokens: most tokens of the request.
            step_tokens: most of its tokens in one step, from 1 on: all are kept, and the window before the block that the step
                begins in, which is cached for later requests.
            block_size: tokens in a block.
        """
        if not self.layers:
            return 0
        whole = -(-tokens // block_size)
        in_layers = sum(
            count * min(whole, -(-(window - 1) // block_size) - (1 - step_tokens) // block_size + 1)
            for window, count in self.layers
        )
        return -(-in_layers // self.whole_layers)

    def tokens_beside(self, num_blocks: int, step_tokens: int, block_size: int) -> int:
        """Count the tokens of the longest request that `num_blocks` blocks hold with its windows."""
        least, most = 0, num_blocks
        while least < most:
            middle = (least + most + 1) // 2
            if middle + self.blocks(middle * block_size, step_tokens, block_size) <= num_blocks:
                least = middle
            else:
                most = middle - 1
        return least * block_size


ONE_TABLE = Windows()
"""Of models whose layers all keep the same tokens."""
