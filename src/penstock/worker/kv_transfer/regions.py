"""A worker's registered KV memory, and the byte ranges of a prefill worker's blocks that make up its own."""

from collections.abc import Sequence

import msgspec
from numpy.typing import ArrayLike

from penstock.core.descriptors import Descriptors
from penstock.core.errors import ConfigError, TransferError, TransferRefused
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv import KvAccess, KvLayout
from penstock.core.wire import encode
from penstock.transfer import Access, TransferAgent
from penstock.transfer.reshard.moves import ReshardPlan, mismatch, plan, region_bytes

_PLANS_MAX = 64
"""Layouts of prefill workers whose reshard plans are cached."""
_decoder = msgspec.msgpack.Decoder(KvLayout)


class KvRegions:
    """The KV regions of one engine. One event loop owns it.

    Attributes:
        ids: region ids by rank, in the layout's order; empty before `register`.
        transports: transports that reach every region.
    """

    def __init__(self, info: EngineInfo) -> None:
        """Make unregistered regions; `info` is the engine's info."""
        self._info = info
        self._layout = info.kv_layout
        self._plans: dict[bytes, ReshardPlan] = {}
        self._encoded = b"" if info.kv_layout is None else encode(info.kv_layout)
        self.ids: tuple[tuple[int, ...], ...] = ()
        self.transports: tuple[str, ...] = ()

    def register(self, memory: Sequence[Sequence[object]], agent: TransferAgent) -> None:
        """Register an engine's KV memory with an entered agent.

        Raises:
            ConfigError: the memory does not match the engine's layout, or no transport reaches it.
        """
        self._check(memory)
        try:
            registered = [
                [
                    agent.register(region, f"kv-{rank}-{index}", access=Access.READ)
                    for index, region in enumerate(regions)
                ]
                for rank, regions in enumerate(memory)
            ]
        except TransferRefused as error:
            raise ConfigError(f"worker.kv_transfer.transfer: {error.message}") from error
        for rank, regions in enumerate(registered):
            self._check_sizes(rank, [one.region.size_bytes for one in regions])
        infos = [one.transport_info for regions in registered for one in regions]
        self.ids = tuple(tuple(one.region_id for one in regions) for regions in registered)
        names = agent.transport_names
        self.transports = tuple(name for name in names if all(name in info for info in infos))
        if not self.transports:
            raise ConfigError(
                f"worker.kv_transfer.transfer.transports: those that work here ({', '.join(names) or 'none'}) do not reach all of"
                " the engine's KV memory; allow others, `penstock doctor` says which work, or leave it out"
            )

    def source(self, agent: bytes) -> KvAccess:
        """Describe how to read this worker's KV; `agent` is its agent's metadata."""
        return KvAccess(agent=agent, layout=self._encoded, regions=self.ids)

    def ranges(
        self, source: KvAccess, source_blocks: ArrayLike, target_blocks: ArrayLike
    ) -> tuple[Descriptors, Descriptors] | None:
        """List the byte ranges to read so that blocks of a prefill worker become blocks of this worker.

        Args:
            source: the prefill worker's KV memory.
            source_blocks: (n,) block ids of the prefill worker.
            target_blocks: (n,) block ids of this worker; source block i is read into target block i.

        Returns:
            ranges here and ranges at the prefill worker, one for one; None if neither engine has KV memory (mocks).

        Raises:
            TransferRefused: the two layouts cannot be converted; the text says why.
            TransferError: `source` is malformed.
        """
        if self._layout is None and not source.layout:
            return None
        moves = self._plan_for(source.layout).moves
        if max(move.source.rank for move in moves) >= len(source.regions):
            raise TransferError(
                f"the prefill worker names regions of {len(source.regions)} ranks, its layout has more"
            )
        pairs = [
            move.descriptors(
                source_blocks,
                target_blocks,
                source_regions=source.regions[move.source.rank],
                target_regions=self.ids[move.target.rank],
            )
            for move in moves
        ]
        if len(pairs) == 1:
            there, here = pairs[0]
            return here, there
        theirs, ours = zip(*pairs, strict=True)
        return Descriptors.joined(ours), Descriptors.joined(theirs)

    def _plan_for(self, encoded: bytes) -> ReshardPlan:
        found = self._plans.get(encoded)
        if found is not None:
            return found
        if self._layout is None or not encoded:
            raise TransferRefused("one of the two engines keeps no memory for KV, the other one does")
        found = plan(_decoded(encoded), self._layout)
        if len(self._plans) >= _PLANS_MAX:
            del self._plans[next(iter(self._plans))]
        self._plans[encoded] = found
        return found

    def _check(self, memory: Sequence[Sequence[object]]) -> None:
        layout, ranks, problem = self._layout, 0, None
        if layout is not None:
            ranks, problem = len(layout.ranks), mismatch(layout, layout)
            if problem is None and layout.block_size != self._info.block_size:
                problem = f"blocks of {layout.block_size} tokens, the engine says {self._info.block_size}"
        if problem is None and len(memory) != ranks:
            problem = f"{ranks} ranks, the engine gives memory of {len(memory)}"
        if problem is not None:
            raise ConfigError(f"kv_layout: {problem}")

    def _check_sizes(self, rank: int, sizes: Sequence[int]) -> None:
        assert self._layout is not None, "there are regions"
        expected = region_bytes(self._layout, rank)
        if len(sizes) != len(expected) or any(
            has < needs for has, needs in zip(sizes, expected, strict=True)
        ):
            raise ConfigError(
                f"kv_layout: rank {rank} has regions of {list(sizes)[:8]} bytes, its layout needs {list(expected)[:8]}"
            )


def _decoded(layout: bytes) -> KvLayout:
    try:
        return _decoder.decode(layout)
    except msgspec.DecodeError as error:
        raise TransferError(f"the prefill worker's layout cannot be read: {error}") from error
