"""What the scheduler's side of a KV connector orders, and what a device process reports. Picklable."""

from dataclasses import dataclass

from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray


@dataclass(frozen=True, slots=True, eq=False)
class LoadRun:
    """Consecutive blocks of a prefix from one tier.

    Attributes:
        tier: keeps them.
        block_hashes: (n, 2) uint64.
        targets: (n,) device blocks.
    """

    tier: Tier
    block_hashes: HashArray
    targets: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class LoadOrder:
    """A load of a request's prefix; its runs follow each other.

    Attributes:
        load_id: names the order.
        request_id: of the request.
        runs: what is loaded.
        is_awaited: the step that it comes with waits for it.
    """

    load_id: int
    request_id: str
    runs: tuple[LoadRun, ...]
    is_awaited: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SaveOrder:
    """Blocks to copy to the tiers that lack them.

    Attributes:
        save_id: names the order.
        block_hashes: (n, 2) uint64, of a prefix from its first block on.
        start: blocks before it are in all tiers.
        block_ids: (n - start,) the device's.
    """

    save_id: int
    block_hashes: HashArray
    start: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """What a device process begins before its next step."""

    loads: tuple[LoadOrder, ...] = ()
    cancelled: tuple[int, ...] = ()
    """Loads whose blocks nobody needs any more."""
    saves: tuple[SaveOrder, ...] = ()
    is_clearing: bool = False
    """Forget all blocks first."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that no longer writes to the device.

    Attributes:
        load_id: of its order.
        request_id: likewise.
        runs: by run, (leading blocks that have arrived, seconds).
        missing: targets that have no content, the first of them and all after it.
        is_late: it was given up.
        is_awaited: as in its order.
    """

    load_id: int
    request_id: str
    runs: tuple[tuple[int, float], ...]
    missing: tuple[int, ...] = ()
    is_late: bool = False
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a device process has done since its last report.

    Attributes:
        loaded: loads that have ended.
        saved: ids of saves that no longer read the device.
        events: KV events of its tiers, in order.
        tiers: what its tiers keep; without what a scheduler counts.
        shared: by tier, whose blocks it loads; None for blocks of its own.
        block_load_s: by tier, seconds to load a block, as the tier measures in the background; 0 if it does not, or not yet.
        is_busy: copies are under way, or more events will come.
    """

    loaded: tuple[Loaded, ...] = ()
    saved: tuple[int, ...] = ()
    events: tuple[KvEvent, ...] = ()
    tiers: tuple[KvTierCounts, ...] = ()
    shared: tuple[KvHolder | None, ...] = ()
    block_load_s: tuple[float, ...] = ()
    is_busy: bool = False
