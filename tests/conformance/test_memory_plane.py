from penstock.sim.loop import SimLoop
from penstock.testing.plane_harness import MemoryPlaneHarness
from penstock.testing.request_plane import RequestPlaneSuite


class TestMemoryPlane(RequestPlaneSuite):
    harness = MemoryPlaneHarness
    loop_factory = SimLoop
