from penstock.sim.loop import SimLoop
from penstock.testing.planes.event_plane import EventPlaneSuite
from penstock.testing.planes.harness import MemoryPlaneHarness, TcpPlaneHarness


class TestMemoryEvents(EventPlaneSuite):
    harness = MemoryPlaneHarness
    loop_factory = SimLoop


class TestTcpEvents(EventPlaneSuite):
    harness = TcpPlaneHarness
