"""What an operator asks of a worker's KV cache, and what it answers."""

from penstock.core.types.events import Tier
from penstock.core.wire import PackedHashes, Wire


class KvList(Wire, frozen=True, tag="kv_list"):
    """List the sessions and pins that keep KV."""


class KvPin(Wire, frozen=True, tag="kv_pin"):
    """Keep the resident blocks of a prefix under a name; `block_hashes` are packed as in `Request`. `is_check` pins nothing, and is refused like the pin."""

    name: str
    block_hashes: PackedHashes
    ttl_s: float | None = None
    is_check: bool = False


class KvUnpin(Wire, frozen=True, tag="kv_unpin"):
    """End a pin, or a session of `tenant` if `is_session`."""

    name: str
    is_session: bool = False
    tenant: str = ""


class KvEvict(Wire, frozen=True, tag="kv_evict"):
    """Drop the blocks of a prefix from the device's cache, as far as nothing uses them."""

    block_hashes: PackedHashes


class KvFlush(Wire, frozen=True, tag="kv_flush"):
    """Clear the cache on the device alone, or on all tiers for None; all sessions and pins end."""

    tier: Tier | None = None


KvAction = KvList | KvPin | KvUnpin | KvEvict | KvFlush


class KvHeld(Wire, frozen=True):
    """A session or pin of a worker.

    Attributes:
        name: the session's id, or the pin's name.
        blocks: that it keeps now.
        requests: of the session, waiting or running.
        expires_s: seconds until it ends; None while a request runs.
        is_speculative: a request's answer, kept for its next turn; `name` is the request's id.
    """

    name: str
    tenant: str = ""
    is_pin: bool = False
    is_ephemeral: bool = False
    blocks: int = 0
    requests: int = 0
    expires_s: float | None = None
    is_speculative: bool = False


class KvReport(Wire, frozen=True):
    """A worker's answer: the blocks that were pinned, unpinned, evicted or flushed, or the list."""

    blocks: int = 0
    held: tuple[KvHeld, ...] = ()
