from penstock.sim.loop import SimLoop
from penstock.testing.planes.direct import RanksSuite
from penstock.testing.planes.harness import MemoryPlaneHarness


class TestMemoryPlane(RanksSuite):
    harness = MemoryPlaneHarness
    loop_factory = SimLoop
