from functools import partial

import uvloop

from penstock.testing.plane_harness import TcpPlaneHarness
from penstock.testing.request_plane import RequestPlaneSuite


class TestTcpPlane(RequestPlaneSuite):
    harness = TcpPlaneHarness


class TestTcpPlaneOnTheOtherLoops(RequestPlaneSuite):
    harness = partial(TcpPlaneHarness, loop="asyncio")
    loop_factory = uvloop.new_event_loop
