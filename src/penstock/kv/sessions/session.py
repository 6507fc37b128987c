"""One open session: the chains of blocks that it keeps."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.core.clock import Timer
from penstock.core.ids import BlockId
from penstock.core.wire import HashArray

CHAINS_MAX = 4
"""Chains of one session; past it the oldest is dropped. More than one where its requests do not continue each other."""


class SessionEnd(StrEnum):
    """Why a session ended, by the names of `SessionCounts`."""

    CLOSED = "closed"
    EXPIRED = "expired"
    DISPLACED = "displaced"
    YIELDED = "yielded"
    CLEARED = "cleared"
    USED = "used"


class SessionKey(NamedTuple):
    """A session's name. Tenants do not see each other's sessions. An operator's pins, and answers kept for a next turn, have names of their own."""

    tenant: str
    name: str
    is_pin: bool = False
    is_speculative: bool = False


@dataclass(slots=True, eq=False)
class Chain:
    """A prefix whose leading blocks are kept.

    Attributes:
        hashes: (n, 2) uint64 of all its full blocks.
        num_prompt: blocks of the prompt; the answer's follow. The next request of the session goes on from these at least.
        block_ids: (m,) the leading blocks that are kept, m <= n.
    """

    hashes: HashArray
    num_prompt: int
    block_ids: list[BlockId]

    def covers(self, other: "Chain") -> bool:
        """Say whether the other chain is a prefix of this one."""
        return _is_prefix(other.hashes, self.hashes)

    def continues(self, other: "Chain") -> bool:
        """Say whether this chain begins with the other one's prompt."""
        return _is_prefix(other.hashes[: other.num_prompt], self.hashes)


@dataclass(slots=True, eq=False)
class Session:
    """An open session, or one that has ended while requests of it run.

    Attributes:
        chains: what it keeps, the latest last.
        requests: of it, waiting or running; it does not expire while there are some.
        own: 16-byte hashes of blocks that an ephemeral session has computed; they are freed when it drops them.
        dropped: such blocks that requests of the session still hold.
    """

    key: SessionKey
    ttl_s: float
    is_ephemeral: bool
    opened_s: float
    chains: list[Chain] = field(default_factory=list)
    requests: int = 0
    is_open: bool = True
    timer: Timer | None = None
    expires_s: float | None = None
    own: set[bytes] = field(default_factory=set)
    dropped: list[bytes] = field(default_factory=list)


def _is_prefix(one: HashArray, other: HashArray) -> bool:
    """Compare chains by their last block, whose hash names the whole prefix."""
    count = len(one)
    return count == 0 or (count <= len(other) and bool((one[-1] == other[count - 1]).all()))
