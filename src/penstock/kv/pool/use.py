"""What a pool is told of its blocks' uses and of what they cost, for eviction."""

import math
from enum import IntEnum
from typing import Literal, NamedTuple

from penstock.core.types.requests import KV_PRIORITY_MAX, KV_PRIORITY_MIN

EvictionPolicy = Literal["lru", "seconds"]
"""Which idle block a full pool evicts first."""

PRIORITY_MIN, PRIORITY_MAX = KV_PRIORITY_MIN, KV_PRIORITY_MAX


class UseKind(IntEnum):
    """What a request that used blocks is; blocks of each kind have chances of reuse of their own."""

    OTHER = 0
    SESSION = 1
    """A turn of a conversation whose client gives it a name."""
    TOOL = 2
    """A turn of an agent: its prompt has results of tools."""


class BlockUse(NamedTuple):
    """One request's use of its blocks, told to the pool when the request ends.

    priority: -8 to 7; idle blocks of a lower priority are evicted first.
    until_s:  when the priority ends, in the time that `BlockPool.expire` is called with; infinite: with the next use.
    tenant:   number of the tenant whose blocks they are from now on (`tenant_number`); 0 is nobody.
    """

    kind: UseKind = UseKind.OTHER
    priority: int = 0
    until_s: float = math.inf
    tenant: int = 0


class PrefillPrice(NamedTuple):
    """What a lost token costs: computing it takes `token_s` and, for each token before it, `deeper_s` more.

    load_s: seconds to load it from a lower tier instead, which is done where it takes less; infinite without one.
    Only the ratios count.
    """

    token_s: float = 1.0
    deeper_s: float = (
        1.0 / 16384
    )  # attention costs as much as the rest at 16 k tokens: an 8B model on an H100, about
    load_s: float = math.inf
