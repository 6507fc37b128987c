"""KV in messages: its layout in memory, how workers exchange it, and what operators ask of it."""

import struct
from functools import cache
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray, PackedHashes, Wire


class KvList(Wire, frozen=True, tag="kv_list"):
    """List the pins that keep KV."""


class KvPin(Wire, frozen=True, tag="kv_pin"):
    """Keep the resident blocks of a prefix under a name; `block_hashes` are packed as in `Request`. `is_check` pins nothing, and is refused like the pin."""

    name: str
    block_hashes: PackedHashes
    ttl_s: float | None = None
    is_check: bool = False


class KvUnpin(Wire, frozen=True, tag="kv_unpin"):
    """End a pin."""

    name: str


class KvEvict(Wire, frozen=True, tag="kv_evict"):
    """Drop the blocks of a prefix from the device's cache, as far as nothing uses them."""

    block_hashes: PackedHashes


class KvFlush(Wire, frozen=True, tag="kv_flush"):
    """Clear the cache on the device alone, or on all tiers for None; all pins end."""

    tier: Tier | None = None


KvAction = KvList | KvPin | KvUnpin | KvEvict | KvFlush


class KvPinned(Wire, frozen=True):
    """A pin of a worker.

    Attributes:
        blocks: device blocks that the pin keeps.
        expires_s: seconds until the pin ends.
    """

    name: str
    blocks: int = 0
    expires_s: float = 0.0


class KvReport(Wire, frozen=True):
    """A worker's answer: the blocks that were pinned, unpinned, evicted or flushed, or the list."""

    blocks: int = 0
    pins: tuple[KvPinned, ...] = ()


class KvAccess(Wire, frozen=True):
    """What a decode worker needs to read a prefill worker's KV memory.

    Attributes:
        agent: metadata of the prefill worker's transfer agent.
        layout: its encoded `KvLayout`; empty for an engine that keeps no memory for KV.
        regions: region ids of that agent, for each rank of the layout.
    """

    agent: bytes = b""
    layout: bytes = b""
    regions: tuple[tuple[int, ...], ...] = ()


class KvExchange(Wire, frozen=True):
    """What a prefill or decode worker registers about KV transfer.

    Attributes:
        transports: transports of `penstock.transfer` that can reach its KV, or that it will try when needed.
        listens: kinds of address at which peers can connect: `memory`, `unix`, `tcp`.
        host: id of the machine, equal for workers that share memory and local sockets.
        streams: whether its KV can be read while the prompt is still being computed.
        setups_s: seconds that each of `transports` needs for its first connection to a peer.
        source: how to read its KV; None for a worker that has exported none so far, such as a decode worker.
    """

    transports: tuple[str, ...]
    listens: tuple[str, ...]
    host: bytes
    streams: bool = False
    setups_s: tuple[float, ...] = ()
    source: KvAccess | None = None

    @classmethod
    def native(cls, kind: str) -> "KvExchange":
        """Describe a worker whose engine transfers KV itself, to engines of the same kind wherever they are."""
        return cls(transports=(kind,), listens=(), host=b"any")


DIMENSIONS = ("layer", "kv", "block", "token", "head")
REGION_DIMENSIONS = ("layer", "kv")
"""Dimensions that may select the region."""
BLOCK_FIRST = "| block layer kv token head"
"""One region; all layers of a block are contiguous, as in the paged engine."""


class RankLayout(Wire, frozen=True):
    """One rank's KV memory.

    Attributes:
        layers: model layers of this rank, in memory order.
        heads: KV heads of this rank, in memory order.
        num_blocks: size of the rank's pool.
        order: dimensions from the outermost to the innermost. Dimensions left of the bar select a region, dimensions right
            of the bar lie within it. The elements of one head of one token are always innermost and contiguous.
            `| block layer kv token head`: one region, all layers of a block contiguous.
            `layer | kv block token head`: a region per layer, all keys before all values.
            `layer kv | block head token`: a region for the keys and one for the values of each layer, heads before tokens.
        strides_bytes: strides of the dimensions right of the bar; empty if there are no gaps.
        offset_bytes: offset of the first byte in each region.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    num_blocks: int
    order: str = BLOCK_FIRST
    strides_bytes: tuple[int, ...] = ()
    offset_bytes: int = 0


class KvLayout(Wire, frozen=True):
    """A worker's KV memory over all its ranks.

    Attributes:
        num_layers: layers of the model.
        num_kv_heads: KV heads of the model; 1 for MLA, where all heads share one latent vector.
        head_dim: elements of one head of one token; for MLA, of the latent vector plus its rotary part.
        dtype: the engine's name of the element type.
        element_bytes: size of one element.
        block_size: tokens in a block.
        ranks: in the engine's order; several ranks may hold the same heads.
        planes: 2 for keys and values, 1 for MLA.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    element_bytes: int
    block_size: int
    ranks: tuple[RankLayout, ...] = ()
    planes: int = 2

    def of_a_block(self) -> Self:
        """Return the layout with one block for each rank: equal for workers whose blocks differ in number alone."""
        ranks = tuple(msgspec.structs.replace(rank, num_blocks=1) for rank in self.ranks)
        return msgspec.structs.replace(self, ranks=ranks)

    def split(self, *, num_blocks: int, tp: int = 1, pp: int = 1, order: str = BLOCK_FIRST) -> Self:
        """Lay the model out over `pp * tp` ranks, as engines do.

        The first `tp` ranks hold the first layers. With more ranks than heads, several ranks hold the same head.

        Args:
            num_blocks: blocks in each rank's pool.
            tp: tensor-parallel ranks, which split the heads of a layer.
            pp: pipeline stages, which split the layers; if that leaves a remainder, the first stages hold one more layer.
            order: see `RankLayout`.

        Raises:
            ConfigError: `tp` and the number of heads do not divide, or `pp` exceeds the number of layers.
        """
        if tp < 1 or max(tp, self.num_kv_heads) % min(tp, self.num_kv_heads):
            raise ConfigError(
                f"tp: {tp} ranks cannot share {self.num_kv_heads} KV heads; one must divide the other"
            )
        if not 1 <= pp <= self.num_layers:
            raise ConfigError(f"pp: must be 1 to {self.num_layers}, one layer each, got {pp}")
        each, more = divmod(self.num_layers, pp)
        starts = [group * each + min(group, more) for group in range(pp + 1)]
        held = max(self.num_kv_heads // tp, 1)
        ranks = (
            RankLayout(
                layers=tuple(range(starts[group], starts[group + 1])),
                heads=tuple(range(first, first + held)),
                num_blocks=num_blocks,
                order=order,
            )
            for group in range(pp)
            for first in (rank * self.num_kv_heads // tp for rank in range(tp))
        )
        return msgspec.structs.replace(self, ranks=tuple(ranks))


CHUNK_TOKENS = 256
"""Of the first chunks of a prompt. A chunk is named by the hash of its last block, and so stands for the whole prefix that ends
there. Computing less than a chunk takes less time than the way to another region."""
_BLOCKS_MAX = 1 << 17
_PER_OCTAVE = 4


def blocks_per_chunk(block_size: int) -> int:
    """Give the blocks of a chunk: those of `CHUNK_TOKENS`, or one where a block is larger."""
    return max(1, CHUNK_TOKENS // block_size)


def chunk_hashes(hashes: HashArray, block_size: int) -> HashArray:
    """Give the hashes of a prompt's full chunks; `hashes` is (n,) uint64, of its full blocks from the root on."""
    ends = chunk_ends(block_size)
    return hashes[ends[: np.searchsorted(ends, len(hashes), side="right")] - 1]


@cache
def chunk_ends(block_size: int) -> NDArray[np.intp]:
    """(n,) blocks before the end of each chunk: ends lie a chunk apart, and beyond eight chunks a quarter to an eighth of the way so far.

    So a prefix of 100,000 tokens has 30 chunks instead of 390, and what is known of it falls short of what is held by a fifth at most.
    """
    ends, step = [], 1
    last = 0
    while last < _BLOCKS_MAX // blocks_per_chunk(block_size):
        if last >= 2 * _PER_OCTAVE * step:
            step *= 2
        last += step
        ends.append(last)
    return np.array(ends, dtype=np.intp) * blocks_per_chunk(block_size)


def pack_root(root: tuple[int, int]) -> bytes:
    """Pack the parent of every first block hash: two prefixes can be compared where theirs are equal."""
    return struct.pack("<QQ", *root)


class PrefixSummary(Wire, frozen=True):
    """Changes of the chunks that one router of a region advertises.

    Attributes:
        origin: the router's process, drawn at its start.
        root: parent of every first block hash, 16 bytes: equal where hash key, hash version, block size and model are.
        chunk_tokens: tokens of the first chunk.
        since: the changes after this version of `origin`; 0: all chunks, which replace earlier ones.
        version: of the last change in this message; more may follow.
        added: chunks that are held now.
        removed: chunks that are held no longer.
    """

    origin: int
    root: bytes
    chunk_tokens: int
    since: int
    version: int
    added: PackedHashes = PackedHashes(b"")
    removed: PackedHashes = PackedHashes(b"")
