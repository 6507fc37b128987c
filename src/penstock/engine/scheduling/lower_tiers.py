"""What a scheduler asks of the tiers below its device."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray


class TierRun(Protocol):
    """Consecutive blocks of a prefix in one tier."""

    @property
    def tier(self) -> Tier:
        """Where they are."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    @property
    def device_ids(self) -> Sequence[BlockId]:
        """Those on the device, which need no loading."""
        ...


class LowerTiers(Protocol):
    """Loads waiting requests' prefixes, and offloads what leaves the batch; `kv.manager.KvManager` is the real one."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that `count` has counted in each lower `Tier`, host first."""
        ...

    @property
    def counts(self) -> KvTierCounts | None:
        """What happened to blocks and loads since start; None if it is not counted."""
        ...

    def watch(self, on_room: Callable[[], None]) -> None:
        """Call `on_room` when device blocks were freed."""
        ...

    def worth(self, block_hashes: HashArray, hits: Sequence[BlockId], known_tokens: int) -> Sequence[Any]:
        """Find the runs to load for a waiting request; empty if computing is quicker.

        Args:
            block_hashes: (n, 2) uint64, blocks of the request that may come from a cache.
            hits: leading blocks that the device has.
            known_tokens: all tokens of the request.

        Returns:
            each a `TierRun`, for `count` and `begin`.
        """
        ...

    def count(self, runs: Sequence[Any], prompt_tokens: int) -> None:
        """Count a request's tokens in lower tiers, up to `prompt_tokens`, the prompt tokens that the device lacks."""
        ...

    def begin(self, request_id: RequestId, runs: Sequence[Any]) -> list[BlockId]:
        """Start to load; returns device blocks for all runs, which the sequence releases."""
        ...

    def is_under_way(self, request_id: RequestId) -> bool:
        """Say whether a request's prefix is still being loaded, or `take_arrived` has not returned it yet."""
        ...

    def take_arrived(self) -> list[tuple[RequestId, int]]:
        """Return the requests whose load has ended since the last call, with the leading blocks of it that arrived."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request's load, if there is one; call it before releasing the request's blocks."""
        ...

    def offload(self, block_hashes: HashArray) -> None:
        """Keep a prefix that is in the device's cache, and may be evicted soon; see `kv.manager.Offloader`."""
        ...

    def with_events(self, events: tuple[KvEvent, ...]) -> tuple[KvEvent, ...]:
        """Add the events of lower tiers since the last call to those of the device."""
        ...

    def holders(self) -> Counter[BlockId]:
        """Count its references to each device block."""
        ...

    def offloading(self) -> Collection[BlockId]:
        """Return the device blocks that offloads read now."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        ...
