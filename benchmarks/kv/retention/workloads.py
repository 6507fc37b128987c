"""Requests of several kinds and tenants on one device, each with what its client may say of it."""

import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from benchmarks.eviction.conversations import Chats, between, lognormal, once, turns, turns_of
from penstock.sim.trace import TraceRow

SPAN_S = 3000.0

_AGENTS = Chats(0.25, [8] * 5, turns(12), between(2, 60), lognormal(6, 0.8), lognormal(2, 0.8))
_CHATS = Chats(0.3, [2], turns(5), between(10, 300), lognormal(6, 0.8), lognormal(2, 0.8))
_ONE_SHOT = Chats(1.5, [8] * 100, once, once, lognormal(6, 1.0), once)
_SCANS = Chats(0.5, [1], once, once, lognormal(30, 0.7), once)
_FLOOD = Chats(6.0, [1], once, once, lognormal(12, 0.8), once)
_BUSY_AGENTS = Chats(0.7, [8] * 5, turns(12), between(2, 60), lognormal(6, 0.8), lognormal(2, 0.8))

AGENTS, CHATS = "agents", "chats"
MIXTURE: Mapping[str, Chats] = {AGENTS: _AGENTS, CHATS: _CHATS, "one-shot": _ONE_SHOT, "scans": _SCANS}
"""Agents that call tools for 2 to 60 s, chats, prompts that come once behind system prompts, and documents read once."""
NEIGHBOURS: Mapping[str, Chats] = {"prompts": _FLOOD, "agents": _BUSY_AGENTS}
"""Who floods the chats' device: prompts of which none comes again, or agents whose prefixes all do."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        group: the part of the workload that it belongs to.
        session: the client's name of its conversation.
        follows_tool: it has a tool's result: an agent's turn after the first.
        system: leading blocks that are the system prompt.
    """

    row: TraceRow
    group: str
    session: str
    follows_tool: bool
    system: int


def mixed(parts: Mapping[str, Chats], seed: int, span_s: float = SPAN_S) -> list[Ask]:
    """Draw the requests of all parts within `span_s`, sorted by time. A part's are the same beside whatever others."""
    asks = [ask for group, chats in parts.items() for ask in _asks(group, chats, seed, span_s)]
    return sorted((ask for ask in asks if ask.row.at_s < span_s), key=lambda ask: ask.row.at_s)


def _asks(group: str, chats: Chats, seed: int, span_s: float) -> Iterator[Ask]:
    rng = random.Random(f"{group} {seed}")
    ids = count(zlib.crc32(group.encode()) << 24)
    for turn in turns_of(rng, ids, chats, span_s=span_s):
        yield Ask(
            row=turn.row,
            group=group,
            session=f"{group}-{turn.conversation}",
            follows_tool=group == AGENTS and turn.number > 0,
            system=turn.system,
        )
