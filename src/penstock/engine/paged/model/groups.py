"""Groups of a model's layers with block tables of their own: those over the whole context, and equally many with a window each."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kv.groups import ONE_TABLE, GroupKind, KvGroup, KvGroups, Windows


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which table and which place in a block each layer has.

    Attributes:
        places: by layer, (number of its group, its place in a block of this group).
        windows: by group, tokens that its layers attend to; None: all.
        layers_per_block: layers that a block has room for. The last group with a window may have fewer.
    """

    places: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...]
    layers_per_block: int

    @classmethod
    def of(cls, windows: Sequence[int | None], context_length: int, *, divide: bool = True) -> "LayerGroups":
        """Divide a model's layers.

        As many layers as are over the whole context make a block, so that all blocks have equal bytes. All layers stay in one
        group if none or all of them have a window, or if a request of `context_length` tokens would then take no less memory.

        Args:
            windows: by layer, tokens that it attends to, itself included; None: all before it.
            context_length: most tokens of a request.
            divide: whether there may be several groups.
        """
        sizes = [None if each is None or each >= context_length else each for each in windows]
        one = cls(tuple((0, layer) for layer in range(len(sizes))), (None,), len(sizes))
        whole = [layer for layer, window in enumerate(sizes) if window is None]
        if not divide or not whole or len(whole) == len(sizes):
            return one
        places = [(0, 0)] * len(sizes)
        groups: list[int | None] = []
        for window in (None, *sorted({each for each in sizes if each is not None}, reverse=True)):
            layers = [layer for layer, size in enumerate(sizes) if size == window]
            for index, layer in enumerate(layers):
                places[layer] = len(groups) + index // len(whole), index % len(whole)
            groups += [window] * -(-len(layers) // len(whole))
        divided = cls(tuple(places), tuple(groups), len(whole))
        held = sum(min(window or context_length, context_length) for window in groups)
        return divided if held * len(whole) < context_length * len(sizes) else one

    def kv_groups(self, block_size: int, token_bytes: int = 0) -> KvGroups | None:
        """Describe the groups to the KV manager, with blocks of `block_size` tokens; None for one group.

        Args:
            block_size: tokens in a block.
            token_bytes: KV of a token in one layer.
        """
        if len(self.windows) == 1:
            return None
        return KvGroups(
            [
                KvGroup(
                    GroupKind.FULL if window is None else GroupKind.SLIDING_WINDOW,
                    tuple(str(layer) for layer, (its, _) in enumerate(self.places) if its == group),
                    token_bytes * self.layers_per_block,
                    window,
                )
                for group, window in enumerate(self.windows)
            ],
            block_size,
        )

    def held_windows(self) -> Windows:
        """Say what windows take beside the blocks of a request's tokens."""
        sizes = [window for window in self.windows if window is not None]
        if not sizes:
            return ONE_TABLE
        return Windows(
            tuple((size, sizes.count(size) * self.layers_per_block) for size in sorted(set(sizes))),
            self.layers_per_block,
        )
