"""What a request may load: the longest prefix that the tiers hold in all groups of layers, as runs of blocks by tier."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.connector.mirror import TierMirror
from penstock.kv.connector.runs import leading_runs
from penstock.kv.groups import KvGroups


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a plan in one tier.

    Attributes:
        tier: keeps them.
        start: first block, numbered from the plan's first.
        end: block after the last.
        num_tokens: tokens of the prompt that need not be computed for this run; blocks after the first group's count none.
    """

    tier: Tier
    start: int
    end: int
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """Blocks that make a longer prefix of a prompt available.

    Attributes:
        num_before: blocks of the prompt that the device has.
        first: low half of the hash of the prompt's next block.
        num_blocks: blocks of the prompt that the plan adds.
        num_found: blocks of the prompt after `num_before` that the first group has in some tier; more than `num_blocks` if
            other groups lack theirs.
        block_hashes: (m, 2) uint64, names of the blocks to load: those of the first group, then those of the next ones.
        runs: where they are, in order; they cover all.
    """

    num_before: int
    first: int
    num_blocks: int
    num_found: int
    block_hashes: HashArray
    runs: tuple[Run, ...]

    def cut(self, num_blocks: int) -> "LoadPlan":
        """Return the plan of fewer blocks, for a model with one table of blocks."""
        runs = tuple(_until(run, num_blocks) for run in self.runs if run.start < num_blocks)
        return replace(self, num_blocks=num_blocks, block_hashes=self.block_hashes[:num_blocks], runs=runs)


def _until(run: Run, end: int) -> Run:
    if run.end <= end:
        return run
    kept = end - run.start
    return replace(run, end=end, num_tokens=run.num_tokens * kept // run.num_blocks)


class Planner:
    """Plans loads by what a mirror says of the tiers."""

    def __init__(self, groups: KvGroups, mirror: TierMirror, block_size: int) -> None:
        """Make it.

        Args:
            groups: of the model.
            mirror: says what tiers have.
            block_size: tokens in a block.
        """
        self._groups = groups
        self._mirror = mirror
        self._block_size = block_size

    def plan(self, block_hashes: HashArray, num_before: int, tiers: Sequence[Tier]) -> LoadPlan:
        """Plan to load the longest prefix that is held.

        Args:
            block_hashes: (n, 2) uint64, blocks of the prompt.
            num_before: of them, leading ones that the device has in all groups.
            tiers: that may be used, nearest first.
        """
        rest = block_hashes[num_before:]
        runs = leading_runs(tiers, self._mirror.locate, rest)
        end = found = runs[-1][2] if runs else 0
        hashes = rest[:found]
        if not self._groups.is_one_table:
            held = [self._mirror.held(tiers, place.names(hashes)) for place in self._groups.others]
            end = int(self._groups.ends(found, held)[-1])
            needed = self._groups.to_load(end)
            hashes = np.concatenate(
                [place.names(rest[blocks.start : blocks.stop]) for place, blocks in needed]
            )
            runs = leading_runs(tiers, self._mirror.locate, hashes)
        return LoadPlan(num_before, int(rest[0, 0]), end, found, hashes, self._with_tokens(runs, end))

    def targets(self, plan: LoadPlan, block_ids: Sequence[Sequence[int]]) -> list[int]:
        """Return the device block of each block of a plan.

        Args:
            plan: the plan.
            block_ids: by the engine's number of a group, its device blocks from the prompt's first one on.
        """
        return [
            block_ids[place.group][plan.num_before + index]
            for place, blocks in self._groups.to_load(plan.num_blocks)
            for index in blocks
        ]

    def _with_tokens(self, runs: Collection[tuple[Tier, int, int]], num_blocks: int) -> tuple[Run, ...]:
        """Divide the prompt's tokens among the runs, by the first group's blocks in each."""
        first = len(self._groups.to_load(num_blocks)[0][1])
        tokens = num_blocks * self._block_size
        return tuple(
            Run(tier, start, end, tokens * max(0, min(end, first) - start) // first if first else 0)
            for tier, start, end in runs
        )
