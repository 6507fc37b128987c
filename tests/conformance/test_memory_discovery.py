from penstock.sim.loop import SimLoop
from penstock.testing.planes.discovery import DiscoverySuite, MemoryDiscoveryHarness


class TestMemoryDiscovery(DiscoverySuite):
    harness = MemoryDiscoveryHarness
    loop_factory = SimLoop
