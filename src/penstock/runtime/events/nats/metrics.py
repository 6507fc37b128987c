"""Metrics of broadcasts by NATS, of one process."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class BroadcastMetrics:
    """Whether NATS answers, and what was lost."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """Register them; None for nowhere."""
        registry = registry or CollectorRegistry()
        self.connected = Gauge(
            "penstock_runtime_broadcasts_connected",
            "1 while the NATS that carries KV events answers, else 0: routers ask workers for them.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.received = Counter(
            "penstock_runtime_broadcasts_received",
            "Messages of workers that have come by NATS.",
            registry=registry,
        )
        self.dropped = Counter(
            "penstock_runtime_broadcasts_dropped",
            "Messages of NATS that were not used: of another secret or release, or more than this process could read in time.",
            ["reason"],
            registry=registry,
        )
