from penstock.sim.loop.loop import SimLoop
from penstock.testing.planes.harness import MemoryPlaneHarness
from penstock.testing.planes.ranks import RanksSuite


class TestMemoryPlane(RanksSuite):
    harness = MemoryPlaneHarness
    loop_factory = SimLoop
