from penstock.testing.discovery import DiscoverySuite, MemoryDiscoveryHarness


class TestMemoryDiscovery(DiscoverySuite):
    harness = MemoryDiscoveryHarness
