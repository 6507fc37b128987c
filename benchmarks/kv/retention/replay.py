"""Requests through one device's blocks, with the retention hints and tenants of an engine's scheduler.

Requests come one after another, each ends before the next begins, and time is that of their arrivals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kv.retention.clock import ReplayClock
from benchmarks.kv.retention.workloads import AGENTS, CHATS, Ask
from penstock.core.ids import BlockId, RequestId
from penstock.core.types.requests import KvRetention, Request, SamplingParams
from penstock.core.wire import NO_TOKENS, HashArray
from penstock.kv.eviction import BlockUse, EvictionPolicy, PrefillPrice, UseKind
from penstock.kv.pool import BlockPool
from penstock.kv.retention import Retention, RetentionConfig
from penstock.sim.trace import PREFIX_BLOCK_TOKENS

_SAMPLING = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Case:
    """What clients say, and what the device makes of it.

    Attributes:
        eviction: of the device.
        names: agents and chats name their sessions.
        tools: prompts show that they have results of tools.
        systems: the pool is told which blocks are of a system prompt, by a kind that clients cannot say.
        priority_ttl_s: agents ask for priority 1, for so long after each request; None: they do not.
        tenant_share: as `kv.tenant_share`; the tenant is the group.
    """

    eviction: EvictionPolicy = "seconds"
    names: bool = False
    tools: bool = False
    systems: bool = False
    priority_ttl_s: float | None = None
    tenant_share: float = 1.0


class Device:
    """One device's blocks, as a scheduler keeps them."""

    def __init__(self, num_blocks: int, case: Case, price: PrefillPrice) -> None:
        self._case = case
        self._clock = ReplayClock()
        self._pool = BlockPool(
            num_blocks, PREFIX_BLOCK_TOKENS, case.eviction, price=price, tenant_share=case.tenant_share
        )
        self._retention = Retention(self._pool, RetentionConfig(), self._clock)
        self._num_asked = 0

    def ask(self, ask: Ask, names: HashArray) -> int:
        """Serve one request, and give its cached blocks.

        Args:
            ask: not earlier than the last one.
            names: (n, 2) uint64, its blocks.
        """
        self._clock.advance(ask.row.at_s)
        self._num_asked += 1
        request = self._request(ask)
        self._retention.arrive(request)
        held = self._pool.match(names)
        self._pool.acquire(held)
        taken = self._pool.allocate(len(names) - len(held))
        if taken is None:  # a prompt larger than the pool
            self._pool.release(held)
            return len(held)
        self._pool.commit(taken, names[len(held) :], int(names[len(held) - 1, 0]) if held else None)
        self._release(ask, held + taken, self._retention.use(request))
        self._pool.take_events()
        return len(held)

    def check(self) -> None:
        """Raise AssertionError if blocks are inconsistent."""
        self._pool.check()

    def _release(self, ask: Ask, blocks: list[BlockId], use: BlockUse) -> None:
        if self._case.systems:  # tails first, as within one release
            self._pool.release(blocks[ask.system :], use)
            self._pool.release(blocks[: ask.system], use._replace(kind=UseKind.SESSION))
        else:
            self._pool.release(blocks, use)

    def _request(self, ask: Ask) -> Request:
        case, is_agent = self._case, ask.group == AGENTS
        retention = None
        if case.priority_ttl_s is not None and is_agent:
            retention = KvRetention(1, case.priority_ttl_s)
        is_named = case.names and ask.group in {AGENTS, CHATS}
        return Request(
            request_id=RequestId(str(self._num_asked)),
            model="",
            token_ids=NO_TOKENS,
            sampling=_SAMPLING,
            session=ask.session if is_named else None,
            tenant=ask.group,
            retention=retention,
            follows_tool=case.tools and ask.follows_tool,
        )


def replay(
    asks: Sequence[Ask], names: Sequence[HashArray], num_blocks: int, case: Case, price: PrefillPrice
) -> list[int]:
    """Give the cached blocks of each request."""
    device = Device(num_blocks, case, price)
    hits = [device.ask(ask, its) for ask, its in zip(asks, names, strict=True)]
    device.check()
    return hits
