"""What an operator does to an engine's KV cache: list, pin, unpin, evict, flush."""

from collections.abc import Callable
from typing import assert_never

import numpy as np

from penstock.core.errors import RequestError
from penstock.core.types.events import Tier
from penstock.core.types.kv import (
    KvAction,
    KvEvict,
    KvFlush,
    KvHeld,
    KvList,
    KvPin,
    KvReport,
    KvUnpin,
)
from penstock.core.wire import HashArray, unpack_hashes
from penstock.kv.pool import BlockPool
from penstock.kv.sessions.session import Session, SessionKey
from penstock.kv.sessions.sessions import Sessions, discard, drop_idle


class KvActions:
    """Acts on one engine's pool and sessions. One task owns it."""

    def __init__(self, pool: BlockPool, sessions: Sessions, clear: Callable[[], None]) -> None:
        """Act on these.

        Args:
            pool: the device's blocks.
            sessions: of this pool.
            clear: ends all sessions, and clears the cache on all tiers.
        """
        self._pool = pool
        self._sessions = sessions
        self._clear = clear

    def act(self, action: KvAction) -> KvReport:
        """Act at once.

        Raises:
            RequestError: a value is out of its range, there is no such pin (404), or sessions keep nothing here (409).
        """
        match action:
            case KvList():
                return KvReport(held=tuple(self._describe(session) for session in self._sessions))
            case KvPin(is_check=True, ttl_s=ttl_s):
                self._sessions.check_pin(ttl_s)
                return KvReport()
            case KvPin(name=name, block_hashes=packed, ttl_s=ttl_s):
                return KvReport(blocks=self._sessions.pin(name, _hashes(packed), ttl_s))
            case KvUnpin(name=name, is_session=is_session, tenant=tenant):
                return KvReport(blocks=self._unpin(SessionKey(tenant, name, is_pin=not is_session)))
            case KvEvict(block_hashes=packed):
                block_ids = self._pool.match(_hashes(packed))
                return KvReport(blocks=discard(self._pool, block_ids))
            case KvFlush(tier=tier):
                return KvReport(blocks=self._flush(tier))
            case _:
                assert_never(action)

    def _unpin(self, key: SessionKey) -> int:
        """Returns the blocks that are kept no more."""
        before = self._sessions.num_kept
        if not self._sessions.unpin(key):
            what = "pin" if key.is_pin else "open session"
            raise RequestError(f"there is no {what} {key.name[:100]!r} here", http_status=404, param="name")
        return before - self._sessions.num_kept

    def _flush(self, tier: Tier | None) -> int:
        """Returns the device blocks that are cached no more; those in use by requests stay if only the device is flushed."""
        before = self._pool.num_cached
        if tier is None:
            self._clear()
        elif tier is Tier.DEVICE:
            self._sessions.clear()
            drop_idle(self._pool, self._pool.idle_blocks())
        else:
            raise RequestError(
                f"tier: must be device, or left out for all tiers, got {tier}: a lower tier is not flushed alone",
                param="tier",
            )
        return before - self._pool.num_cached

    def _describe(self, session: Session) -> KvHeld:
        blocks = {block_id for chain in session.chains for block_id in chain.block_ids}
        return KvHeld(
            name=session.key.name,
            tenant=session.key.tenant,
            is_pin=session.key.is_pin,
            is_ephemeral=session.is_ephemeral,
            blocks=len(blocks),
            requests=session.requests,
            expires_s=self._sessions.expires_in_s(session),
            is_speculative=session.key.is_speculative,
        )


def _hashes(packed: bytes) -> HashArray:
    """Unpack (n, 2) hashes.

    Raises:
        RequestError: there is none, or they are no hashes of 16 bytes.
    """
    if not packed or len(packed) % 16:
        raise RequestError(
            f"block_hashes: must be hashes of 16 bytes, at least one, got {len(packed)} bytes: the prompt must fill a block"
        )
    hashes: HashArray = np.asarray(unpack_hashes(packed)).reshape(-1, 2)
    return hashes
