"""The open sessions of one engine, and the device blocks that they keep between requests."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from penstock.core.clock import Clock, LoopClock
from penstock.core.errors import RequestError
from penstock.core.ids import BlockId, RequestId
from penstock.core.types.load import SessionCounts
from penstock.core.types.requests import Request, SessionAction
from penstock.core.wire import HashArray
from penstock.kv.pool import BlockPool, Pins, block_keys
from penstock.kv.sessions.config import SessionsConfig
from penstock.kv.sessions.retention import check_ttl
from penstock.kv.sessions.session import CHAINS_MAX, Chain, Session, SessionEnd, SessionKey


class Sessions:
    """Pins the blocks of open sessions within a quota, until they are closed, expire or are displaced.

    `begin`, `hold` and `end` are called for each request, in this order. Not thread-safe; one task owns it.
    """

    def __init__(
        self,
        pool: BlockPool,
        pins: Pins,
        config: SessionsConfig,
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Make it without sessions.

        Args:
            pool: the device's blocks.
            pins: of this pool; sessions pin through them.
            config: bounds.
            on_change: called when a session ended outside of a step: KV events may wait, and blocks were freed.
            clock: of TTLs; None is the event loop's.
        """
        self.on_change = on_change
        self.has_unreported = False
        """Whether what sessions keep has changed outside of a step, and no step has reported it yet."""
        self.config = config
        self.blocks_max = int(config.kv_share * pool.num_blocks)
        """Most blocks that all sessions together keep."""
        self._pool = pool
        self._pins = pins
        self._clock = clock or LoopClock()
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()  # unused for longest first
        self._by_request: dict[RequestId, Session] = {}
        self._kept: Counter[BlockId] = Counter()  # by how many chains
        self._ends: Counter[SessionEnd] = Counter()
        self._opened = self._speculative = self._wasted = 0
        self._awaited: dict[tuple[str, bytes], Session] = {}
        """Answers kept for a next turn, by their tenant and the last hash of their prompts."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Give the open sessions, the one unused for longest first."""
        return iter(self._sessions.values())

    # ---- requests -------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Note a request that was accepted; it may open its session.

        Raises:
            RequestError: its TTL is longer than `ttl_s_max`; nothing was noted.
        """
        if request.prefill_only:  # the decode worker keeps the KV
            return
        session = self._begun(request)
        if session is None and request.speculative_prefill and self.blocks_max:
            key = SessionKey(request.tenant, request.request_id, is_speculative=True)
            session = self._open(key, None, is_ephemeral=False)
        if session is None:
            return
        session.requests += 1
        self._touch(session)
        self._by_request[request.request_id] = session

    def _begun(self, request: Request) -> Session | None:
        """Find or open the session that a request names; None without one."""
        if request.session is None:
            return None
        control = request.session_control
        if control is not None and control.ttl_s is not None:
            check_ttl("session.ttl_s", control.ttl_s, self.config)
        key = SessionKey(request.tenant, request.session)
        session = self._sessions.get(key)
        if control is not None and session is None and self.blocks_max:
            if control.action is SessionAction.OPEN or control.is_ephemeral:
                session = self._open(key, control.ttl_s, is_ephemeral=control.is_ephemeral)
        elif control is not None and session is not None and control.ttl_s is not None:
            session.ttl_s = control.ttl_s
        return session

    def hold(self, request: Request, block_hashes: HashArray, *, num_prompt: int, num_shared: int) -> None:
        """Keep the blocks of a request that is about to leave the batch.

        Args:
            request: begun.
            block_hashes: (n, 2) uint64, its blocks in the prefix cache.
            num_prompt: how many of them are the prompt's.
            num_shared: leading ones that were cached before it.
        """
        session = self._by_request.get(request.request_id)
        if self._awaited:
            self._note_next_turn(request.tenant, block_hashes[:num_shared])
        if session is None or not len(block_hashes):
            return
        if session.is_ephemeral:
            own = block_keys(block_hashes[num_shared:])
            session.own.update(own)
            if not session.is_open:
                session.dropped += own
        if session.is_open:
            self._keep(session, Chain(block_hashes, min(num_prompt, len(block_hashes)), []))
            if session.key.is_speculative and session.chains:
                self._await_next_turn(session)

    def end(self, request: Request, *, is_done: bool) -> None:
        """Note that a request holds no blocks any more. One that closes its session does so if it `is_done`, not aborted."""
        session = self._by_request.pop(request.request_id, None)
        if session is None:
            return
        session.requests -= 1
        self._free_dropped(session)
        if not session.is_open:
            return
        if session.key.is_speculative and not session.chains:
            self._close(session, SessionEnd.CLOSED)
            return
        self._touch(session)
        control = request.session_control
        if is_done and control is not None and control.action is SessionAction.CLOSE:
            self._close(session, SessionEnd.CLOSED)

    def is_ephemeral(self, request: Request) -> bool:
        """Say whether a begun request belongs to an ephemeral session."""
        session = self._by_request.get(request.request_id)
        return session is not None and session.is_ephemeral

    # ---- operators ------------------------------------------------------------------------------------

    def pin(self, name: str, block_hashes: HashArray, ttl_s: float | None) -> int:
        """Keep the resident prefix of a chain for `ttl_s`, None for `sessions.ttl_s`, or until `unpin`; another pin of this name is replaced.

        Returns:
            how many leading blocks are kept: fewer where they are not resident, or past the quota.

        Raises:
            RequestError: the TTL is longer than `ttl_s_max`, or sessions keep no blocks here.
        """
        self.check_pin(ttl_s)
        key = SessionKey("", name, is_pin=True)
        self.unpin(key)
        session = self._open(key, ttl_s, is_ephemeral=False)
        if session is None:
            raise RequestError(
                f"all {len(self)} sessions, sessions.sessions_max, are in use; try again later",
                http_status=409,
            )
        chain = Chain(block_hashes, len(block_hashes), [])
        self._keep(session, chain)
        if chain.block_ids:
            self._touch(session)
        else:
            self._close(session, SessionEnd.CLOSED)
        return len(chain.block_ids)

    def check_pin(self, ttl_s: float | None) -> None:
        """Refuse a pin that could not be kept, whatever is resident.

        Raises:
            RequestError: as `pin`.
        """
        if ttl_s is not None:
            check_ttl("ttl_s", ttl_s, self.config)
        if not self.blocks_max:
            raise RequestError(
                f"this worker keeps no blocks for sessions (sessions.kv_share {self.config.kv_share:g}); raise it",
                http_status=409,
            )

    def unpin(self, key: SessionKey) -> bool:
        """Close a session or a pin; False if it is not open."""
        session = self._sessions.get(key)
        if session is not None:
            self._close(session, SessionEnd.CLOSED)
            self.has_unreported = True
            self.on_change()
        return session is not None

    # ---- pressure -------------------------------------------------------------------------------------

    def end_speculative(self) -> bool:
        """End the oldest answer that is kept for a next turn, so that a request has room; False if there is none."""
        for session in self:
            if session.key.is_speculative and not session.requests:
                self._close(session, SessionEnd.YIELDED)
                return True
        return False

    def give_way(self) -> bool:
        """End the session unused for longest, so that a request can run that needs its blocks; False if none keeps any."""
        keeping = [session for session in self if session.chains]
        if not keeping:
            return False
        first = min(keeping, key=lambda session: session.requests > 0)
        if first.requests:  # it stays open, and keeps what its request leaves
            self._drop(first, list(first.chains))
        else:
            self._close(first, SessionEnd.YIELDED)
        return True

    def clear(self) -> None:
        """End all sessions: the cache is about to be cleared."""
        for session in list(self):
            self._close(session, SessionEnd.CLEARED)

    # ---- reports --------------------------------------------------------------------------------------

    @property
    def num_kept(self) -> int:
        """Device blocks that sessions keep."""
        return len(self._kept)

    def expires_in_s(self, session: Session) -> float | None:
        """Give the seconds until a session ends; None while a request of it runs."""
        return None if session.expires_s is None else max(session.expires_s - self._clock.time(), 0.0)

    @property
    def counts(self) -> SessionCounts | None:
        """What is kept, and how sessions have ended; None before the first one."""
        if not self._opened:
            return None
        ends = {reason.value: self._ends[reason] for reason in SessionEnd if reason is not SessionEnd.USED}
        return SessionCounts(
            open=len(self),
            pinned_blocks=len(self._kept),
            pinned_blocks_max=self.blocks_max,
            opened=self._opened - self._speculative,
            speculative=self._speculative,
            speculative_used=self._ends[SessionEnd.USED],
            speculative_wasted=self._wasted,
            **ends,
        )

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert len(self) <= self.config.sessions_max, f"{len(self)} sessions: past sessions_max"
        assert len(self._kept) <= self.blocks_max, f"{len(self._kept)} blocks kept: past {self.blocks_max}"
        kept = Counter(
            block_id for session in self for chain in session.chains for block_id in chain.block_ids
        )
        assert kept == self._kept, "other blocks are kept than counted"
        held = self._pins.holders()
        assert all(held.get(block_id, 0) >= times for block_id, times in kept.items()), (
            "a kept block is not pinned"
        )
        requests = Counter(session.key for session in self._by_request.values() if session.is_open)
        for key, session in self._sessions.items():
            assert session.is_open, f"{key}: ended, and still listed"
            assert session.requests == requests[key], (
                f"{key}: {session.requests} requests, known {requests[key]}"
            )
            assert len(session.chains) <= CHAINS_MAX, f"{key}: {len(session.chains)} chains"
            assert (session.timer is None) == (session.requests > 0), f"{key}: expires while used, or never"

    # ---- one session ----------------------------------------------------------------------------------

    def _open(self, key: SessionKey, ttl_s: float | None, *, is_ephemeral: bool) -> Session | None:
        """Open a session; None where all others are in use and there may be no more."""
        while len(self) >= self.config.sessions_max:
            if not self._displace():
                return None
        ttl_s = self.config.ttl_s if ttl_s is None else ttl_s
        session = self._sessions[key] = Session(key, ttl_s, is_ephemeral, self._clock.time())
        self._opened += 1
        self._speculative += key.is_speculative
        return session

    def _touch(self, session: Session) -> None:
        """Note a use; the TTL begins anew."""
        self._sessions.move_to_end(session.key)
        if session.timer is not None:
            session.timer.cancel()
            session.timer = session.expires_s = None
        if not session.requests:
            session.timer = self._clock.call_later(session.ttl_s, partial(self._expire, session))
            session.expires_s = self._clock.time() + session.ttl_s

    def _expire(self, session: Session) -> None:
        session.timer = None
        if session.is_open and not session.requests:
            self._close(session, SessionEnd.EXPIRED)
            self.has_unreported = True
            self.on_change()

    def _close(self, session: Session, reason: SessionEnd) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        session.is_open = False
        del self._sessions[session.key]
        if session.key.is_speculative:
            self._forget_awaited(session)
            self._wasted += reason is not SessionEnd.USED
        if reason is SessionEnd.USED or not session.key.is_speculative:
            self._ends[reason] += 1
        self._drop(session, list(session.chains))

    def _displace(self, beside: Session | None = None) -> bool:
        """End the session unused for longest that no request uses, other than `beside` and pins; False if there is none.

        Answers kept for a next turn end first.
        """
        idle = (
            session
            for session in self
            if session is not beside and not session.requests and not session.key.is_pin
        )
        first = min(idle, key=lambda session: not session.key.is_speculative, default=None)
        if first is None:
            return False
        self._close(first, SessionEnd.DISPLACED)
        return True

    # ---- next turns without a session -----------------------------------------------------------------

    def _await_next_turn(self, session: Session) -> None:
        """Keep a request's answer until a request begins with its prompt."""
        chain = session.chains[-1]
        if not chain.num_prompt:
            return
        (key,) = block_keys(chain.hashes[chain.num_prompt - 1 : chain.num_prompt])
        before = self._awaited.pop((session.key.tenant, key), None)
        if before is not None and before is not session:
            self._close(before, SessionEnd.DISPLACED)
        self._awaited[session.key.tenant, key] = session

    def _note_next_turn(self, tenant: str, shared: HashArray) -> None:
        """End what was kept for a tenant's request that found the blocks `shared`."""
        for key in block_keys(shared):
            session = self._awaited.get((tenant, key))
            if session is not None and not session.requests:
                self._close(session, SessionEnd.USED)

    def _forget_awaited(self, session: Session) -> None:
        for key in [key for key, its in self._awaited.items() if its is session]:
            del self._awaited[key]

    # ---- blocks ---------------------------------------------------------------------------------------

    def _keep(self, session: Session, chain: Chain) -> None:
        """Pin a chain's resident prefix in place of those that it continues, and make room within the quota."""
        if any(other.covers(chain) for other in session.chains):
            return
        chain.block_ids = self._pins.pin(chain.hashes)
        self._kept.update(chain.block_ids)
        replaced = [other for other in session.chains if chain.continues(other)]
        session.chains.append(chain)
        self._drop(session, replaced)
        self._drop(session, session.chains[:-CHAINS_MAX])
        while len(self._kept) > self.blocks_max and self._displace(beside=session):
            pass
        over = len(self._kept) - self.blocks_max
        while over > 0 and len(session.chains) > 1:
            self._drop(session, session.chains[:1])
            over = len(self._kept) - self.blocks_max
        if over > 0:
            self._trim(session, chain, over)
        if not chain.block_ids:  # else the session would end for a request's room, and free nothing
            self._drop(session, [chain])

    def _trim(self, session: Session, chain: Chain, count: int) -> None:
        """Keep fewer of a chain's blocks: without the last ones of which `count` are no other chain's."""
        end = len(chain.block_ids)
        while count > 0 and end:
            end -= 1
            count -= self._kept[chain.block_ids[end]] == 1
        self._unpin(session, chain, end)

    def _drop(self, session: Session, chains: Sequence[Chain]) -> None:
        for chain in chains:
            session.chains.remove(chain)
            self._unpin(session, chain, 0)

    def _unpin(self, session: Session, chain: Chain, start: int) -> None:
        """Unpin a chain's blocks from `start` on."""
        block_ids, chain.block_ids = chain.block_ids[start:], chain.block_ids[:start]
        self._kept.subtract(block_ids)
        gone = [index for index, block_id in enumerate(block_ids) if not self._kept[block_id]]
        for index in gone:
            del self._kept[block_ids[index]]
        self._pins.unpin(block_ids)
        if session.own:
            keys = block_keys(chain.hashes[start : start + len(block_ids)])
            session.dropped += [keys[index] for index in gone if keys[index] in session.own]
            self._free_dropped(session)

    def _free_dropped(self, session: Session) -> None:
        """Free an ephemeral session's own blocks that it has dropped, as if they had never been cached; not those in use."""
        held = []
        for key in session.dropped:
            block_ids = self._pool.match(np.frombuffer(key, dtype="<u8").reshape(1, 2))
            if not block_ids or discard(self._pool, block_ids):
                session.own.discard(key)
            else:
                held.append(key)
        session.dropped = held if session.requests else []


def discard(pool: BlockPool, block_ids: Sequence[BlockId]) -> int:
    """Drop idle blocks from the prefix cache and free them.

    Args:
        pool: of the blocks.
        block_ids: those that are referenced are left alone.

    Returns:
        how many were dropped.
    """
    idle = [block_id for block_id in dict.fromkeys(block_ids) if pool.count_idle([block_id])]
    drop_idle(pool, idle)
    return len(idle)


def drop_idle(pool: BlockPool, idle: Sequence[BlockId]) -> None:
    """Drop blocks from the prefix cache and free them; each is idle, and named once."""
    pool.acquire(idle)
    pool.forget(idle)
    pool.release(idle)
