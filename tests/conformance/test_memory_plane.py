from penstock.sim.loop.loop import SimLoop
from penstock.testing.planes.harness import MemoryPlaneHarness
from penstock.testing.planes.request_plane import RequestPlaneSuite


class TestMemoryPlane(RequestPlaneSuite):
    harness = MemoryPlaneHarness
    loop_factory = SimLoop
