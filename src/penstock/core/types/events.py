"""KV events: blocks that a worker stored or removed in a tier, in numbered batches."""

from enum import StrEnum

from penstock.core.wire import PackedHashes, Wire


class Tier(StrEnum):
    """Where a copy of a block is, nearest to the engine first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"


class Holder(StrEnum):
    """Who keeps a copy of a block, and so which workers can load it."""

    WORKER = "worker"
    HOST = "host"  # all workers of a host that share an arena
    FLEET = "fleet"  # all workers that use an object store


SHARED_HOLDER = {Tier.HOST: Holder.HOST, Tier.OBJECT: Holder.FLEET}
"""Who keeps the blocks of a tier that several workers load from."""
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
    holder: Holder = Holder.WORKER


class BlockRemoved(Wire, frozen=True, tag="removed"):
    block_hashes: PackedHashes
    tier: Tier = Tier.DEVICE
    holder: Holder = Holder.WORKER


class AllBlocksCleared(Wire, frozen=True, tag="cleared"):
    """All blocks of a holder are gone, in all tiers, as far as the worker that tells it can load them."""

    holder: Holder = Holder.WORKER


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Wire, frozen=True, tag="batch"):
    """The events of one engine step and holder; a worker numbers its batches of each holder 1, 2, 3, ... without gaps."""

    sequence: int
    events: tuple[KvEvent, ...]
    holder: Holder = Holder.WORKER


class EventSnapshot(Wire, frozen=True, tag="snapshot"):
    """One chunk of the whole content of a worker, or of another holder as it knows it, as of batch `sequence`.

    Once the chunk with `last` has arrived, the snapshot replaces what the subscriber knew of this holder.
    """

    sequence: int
    chunk: int
    last: bool
    events: tuple[BlockStored, ...]
    holder: Holder = Holder.WORKER


class EventPosition(Wire, frozen=True, tag="position"):
    """The number of a holder's batch that every subscriber should have by now; it carries no events."""

    sequence: int
    holder: Holder = Holder.WORKER


EventMessage = EventBatch | EventSnapshot | EventPosition
