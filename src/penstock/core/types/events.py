"""KV events: blocks that a worker stored or removed in a tier, in numbered batches."""

from enum import StrEnum

from penstock.core.wire import PackedHashes, Wire


class Tier(StrEnum):
    """Where a copy of a block is, nearest to the engine first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"


Copies = tuple[int, ...]
"""How many copies of one block a worker holds in each `Tier`, device first."""
COPIES_MAX = 4095
"""Copies are counted up to here: 12 bits for each tier in the prefix index."""


class BlockStored(Wire, frozen=True, tag="stored"):
    """Blocks became readable; each is the child of the one before it. `parent_block_hash` is the first one's parent, None: root."""

    block_hashes: PackedHashes
    parent_block_hash: int | None
    block_size: int
    tier: Tier = Tier.DEVICE


class BlockRemoved(Wire, frozen=True, tag="removed"):
    block_hashes: PackedHashes
    tier: Tier = Tier.DEVICE


class AllBlocksCleared(Wire, frozen=True, tag="cleared"):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Wire, frozen=True, tag="batch"):
    """The events of one engine step; a worker numbers its batches 1, 2, 3, ... without gaps."""

    sequence: int
    events: tuple[KvEvent, ...]


class EventSnapshot(Wire, frozen=True, tag="snapshot"):
    """One chunk of a worker's whole content as of batch `sequence`.

    Once the chunk with `last` has arrived, the snapshot replaces what the subscriber knew of this worker.
    """

    sequence: int
    chunk: int
    last: bool
    events: tuple[BlockStored, ...]


EventMessage = EventBatch | EventSnapshot
