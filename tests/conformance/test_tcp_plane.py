from penstock.testing.plane_harness import TcpPlaneHarness
from penstock.testing.request_plane import RequestPlaneSuite


class TestTcpPlane(RequestPlaneSuite):
    harness = TcpPlaneHarness
