"""Metrics of a process's connection to the registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class RegistryMetrics:
    """Whether the registry answers, and what of it this process cannot use."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """Register them; None for nowhere."""
        registry = registry or CollectorRegistry()
        self.connected = Gauge(
            "penstock_runtime_registry_connected",
            "1 while the registry of workers answers, else 0: what is known is used on.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.losses = Counter(
            "penstock_runtime_registry_losses",
            "Times that a registry which had answered no longer did.",
            registry=registry,
        )
        self.refused_clients = Gauge(
            "penstock_runtime_hub_refused_clients",
            "Processes that the hub has not accepted since its start: their secret, hash key or release is another.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.refused = Counter(
            "penstock_runtime_registrations_refused",
            "Registrations that this process cannot use: damaged, of another version, secret or hash_key.",
            ["reason"],
            registry=registry,
        )
        self.refused_starts = Counter(
            "penstock_runtime_refused_starts",
            "Starts of other deployments or releases in this namespace of the registry that were given up there.",
            ["reason"],
            registry=registry,
        )
