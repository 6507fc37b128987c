from penstock.testing.event_plane import EventPlaneSuite
from penstock.testing.plane_harness import MemoryPlaneHarness, TcpPlaneHarness


class TestMemoryEvents(EventPlaneSuite):
    harness = MemoryPlaneHarness


class TestTcpEvents(EventPlaneSuite):
    harness = TcpPlaneHarness
