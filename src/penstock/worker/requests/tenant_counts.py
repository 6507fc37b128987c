"""Counts what tenants use over all frontends of a deployment, which tell each other through one worker."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from penstock.core.types.load import TENANTS_MAX, PeerCount, TenantCount
from penstock.seams import FrontendSink

LATELY_S = 5.0
"""A frontend that has not counted for so long, or that had no requests of a tenant, is not one of the tenant's frontends."""


@dataclass(slots=True, eq=False)
class _Frontend:
    """A frontend that counts here.

    counted_s: when it did last
    inflight:  its requests in flight then, by tenant
    active_s:  when a tenant last had requests there
    peers:     (requests, tokens) by tenant that others have used since
    """

    counted_s: float
    inflight: Mapping[str, int] = field(default_factory=dict)
    active_s: dict[str, float] = field(default_factory=dict)
    peers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def begin(self, counts: Mapping[str, TenantCount], now_s: float) -> None:
        """Take the frontend's requests in flight by tenant; a tenant that `counts` does not name has none."""
        self.counted_s = now_s
        self.inflight = {name: count.inflight for name, count in counts.items()}
        active_s = dict.fromkeys(counts, now_s)
        for name, since_s in self.active_s.items():
            if now_s - since_s < LATELY_S and len(active_s) < TENANTS_MAX:
                active_s.setdefault(name, since_s)
        self.active_s = active_s

    def add(self, name: str, count: TenantCount) -> None:
        """Add what another frontend has used, for `TENANTS_MAX` tenants at most: as many as one message has."""
        requests, tokens = self.peers.get(name, (0, 0))
        if len(self.peers) < TENANTS_MAX or name in self.peers:
            self.peers[name] = requests + count.requests, tokens + count.tokens


class TenantCounter:
    """Keeps the counts of connected frontends, at most `TENANTS_MAX` tenants for each. One event loop owns it."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        """Know no frontend; `now_s` is the clock, None: the event loop's."""
        self._now_s = now_s or (lambda: asyncio.get_running_loop().time())
        self._frontends: dict[FrontendSink, _Frontend] = {}

    def count(self, counts: Mapping[str, TenantCount], sink: FrontendSink) -> dict[str, PeerCount]:
        """Add what a frontend's tenants have used, and give what they have used at the others since it counted last.

        Args:
            counts: of every tenant that has used something or has requests in flight.
            sink: the frontend's.
        """
        now_s = self._now_s()
        self._frontends = {
            each: known for each, known in self._frontends.items() if now_s - known.counted_s < LATELY_S
        }
        own = self._frontends.setdefault(sink, _Frontend(now_s))
        own.begin(counts, now_s)
        others = [each for each in self._frontends.values() if each is not own]
        for other in others:
            for name, count in counts.items():
                other.add(name, count)
        used, own.peers = own.peers, {}
        names = used.keys() | {name for other in others for name in other.active_s}
        return {name: _peer_count(name, used, others) for name in islice(names, TENANTS_MAX)}

    def forget(self, sink: FrontendSink) -> None:
        """Drop a frontend that has gone: it has nothing in flight, and what its tenants used stays used."""
        self._frontends.pop(sink, None)

    def check(self) -> None:
        """Raise AssertionError where a table is past its bound."""
        for frontend in self._frontends.values():
            for table in (frontend.inflight, frontend.active_s, frontend.peers):
                assert len(table) <= TENANTS_MAX, len(table)


def _peer_count(name: str, used: Mapping[str, tuple[int, int]], others: list[_Frontend]) -> PeerCount:
    requests, tokens = used.get(name, (0, 0))
    return PeerCount(
        requests=requests,
        tokens=tokens,
        inflight=sum(other.inflight.get(name, 0) for other in others),
        frontends=sum(name in other.active_s for other in others),
    )
