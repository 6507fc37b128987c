"""Counters of an agent, for metrics."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferCounters:
    """Totals since the agent began; mappings are by transport.

    `refused` counts peers' refused requests by error code; `lost_peers` counts links that ended without a disconnect here.
    """

    read_bytes: dict[str, int] = field(default_factory=dict)
    written_bytes: dict[str, int] = field(default_factory=dict)
    transfers: dict[str, int] = field(default_factory=dict)
    failed_transfers: dict[str, int] = field(default_factory=dict)
    failed_over_transfers: dict[str, int] = field(default_factory=dict)
    cancelled_transfers: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    notifications_sent: int = 0
    notifications_received: int = 0
    lost_peers: int = 0


def add(counts: dict[str, int], key: str, amount: int = 1) -> None:
    counts[key] = counts.get(key, 0) + amount
