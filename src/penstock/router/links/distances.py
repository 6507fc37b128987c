"""How far a worker is from this router."""

from penstock.core.types.instances import Instance
from penstock.core.types.location import Location
from penstock.perf.topology import NetworkPath
from penstock.router.config import RouterConfig

_LATENCY_S_MAX = 60.0


def path_to(instance: Instance, location: Location, config: RouterConfig) -> NetworkPath:
    """Give the way to a worker: as it says itself, as links to other regions may, or by the topology."""
    said = instance.distance
    if said is None:
        return config.topology.path(config.location, location)
    return NetworkPath(
        latency_s=min(max(said.latency_s, 0.0), _LATENCY_S_MAX),
        bandwidth_bytes_per_s=max(said.bandwidth_bytes_per_s, 1.0),
    )
