"""Turns of tenants: start-time fair queueing by chunks of prompts, first come first served within a tenant.

Each tenant has a virtual clock, the prompt tokens it was served. A prompt begins where its tenant's clock stands, and its rank is
that plus what is computed of it; the lowest rank is next. So a prompt that was begun is overtaken by one of a tenant that was
served less. A tenant's clock is at most `CREDIT_TOKENS` behind the one that is ahead: so much may a quiet tenant get at once.
All clocks are equal again whenever no prompt is left: nobody waited, so nobody owes. A tenant that begins a flood then is not
ahead of one that asks all the time.
"""

from collections import OrderedDict

from penstock.engine.scheduling.order.ranked_queue import Ranked

CREDIT_TOKENS = 32_768
"""As `router.queue.tenant_burst_tokens` by default: a prompt that the router lets past others overtakes them in the worker too."""
TURN_TOKENS = 2048
"""A prompt of 32,000 tokens in steps of 8,192 moves another tenant's p99 TTFT by 1.86, in steps of 2,048 by 1.47; these cost 3 % of its speed."""
_TENANTS_MAX = 1024
"""Clocks that are kept; those that moved last."""


class TenantTurns:
    """A `PromptOrder`: tenants by what they were served."""

    turn_tokens: int | None = TURN_TOKENS

    def __init__(self, tenant: str) -> None:
        """Begin with one tenant's requests, which have all been served equally."""
        self._clocks: OrderedDict[str, float] = OrderedDict({tenant: 0.0})
        self._ahead = self._floor = 0.0

    def rank(self, sequence: Ranked, lacking: int) -> float:
        if sequence.turn_end is None:
            tenant = sequence.request.tenant
            start = max(self._clocks.pop(tenant, self._floor), self._ahead - CREDIT_TOKENS)
            sequence.turn_end = self._clocks[tenant] = start + lacking
            if len(self._clocks) > _TENANTS_MAX:
                self._clocks.popitem(last=False)
        return sequence.turn_end - lacking

    def note(self, sequence: Ranked, left: int) -> None:
        if sequence.turn_end is not None:
            self._ahead = max(self._ahead, sequence.turn_end - left)

    def on_idle(self) -> None:
        """Set all clocks to the one that is ahead."""
        if self._clocks:
            self._floor = self._ahead = max(self._ahead, *self._clocks.values())
            self._clocks.clear()
