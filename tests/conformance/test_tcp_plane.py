from functools import partial

import uvloop

from penstock.testing.planes.harness import TcpPlaneHarness
from penstock.testing.planes.request_plane import RequestPlaneSuite


class TestTcpPlane(RequestPlaneSuite):
    harness = TcpPlaneHarness


class TestTcpPlaneOnTheOtherLoops(RequestPlaneSuite):
    harness = partial(TcpPlaneHarness, loop="asyncio")
    loop_factory = uvloop.new_event_loop
