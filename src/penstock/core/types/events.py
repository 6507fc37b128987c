"""KV events: which blocks a worker stored or removed, in which tier, and the numbered batches they travel in."""

from enum import StrEnum

from penstock.core.wire import PackedHashes, Wire


class Tier(StrEnum):
    """Where a block lies, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"


class BlockStored(Wire, frozen=True, tag="stored"):
    """Blocks became readable, chained in this order; `parent_block_hash` comes before the first (None: root)."""

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
    """One chunk of a worker's whole content as of `sequence`; replaces what a subscriber knew once `last` has come."""

    sequence: int
    chunk: int
    last: bool
    events: tuple[BlockStored, ...]


EventMessage = EventBatch | EventSnapshot
