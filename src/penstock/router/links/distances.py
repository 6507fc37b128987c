"""How far a worker is from this router."""

from penstock.core.types.instances import Instance, Location
from penstock.perf.topology import NetworkPath
from penstock.router.config import RouterConfig

_LATENCY_S_MAX = 60.0


def path_to(instance: Instance, config: RouterConfig, round_trip_s: float = 0.0) -> NetworkPath:
    """Give the way to a worker.

    Args:
        instance: its registration; links to other regions may say how far these are.
        config: where this router is, and the topology, which tells how far other workers are.
        round_trip_s: as a link has measured it, which counts more than what anybody says; 0: not measured.
    """
    said = instance.distance
    path = config.topology.path(config.location, Location.of(instance)) if said is None else said
    latency_s = round_trip_s / 2 or path.latency_s
    return NetworkPath(
        latency_s=min(max(latency_s, 0.0), _LATENCY_S_MAX),
        bandwidth_bytes_per_s=max(path.bandwidth_bytes_per_s, 1.0),
    )
