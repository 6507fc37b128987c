from functools import partial

import pytest
import uvloop

from penstock.testing.planes.direct import RanksSuite
from penstock.testing.planes.harness import TcpPlaneHarness


class TestTcpPlane(RanksSuite):
    harness = TcpPlaneHarness


@pytest.mark.nightly
class TestTcpPlaneOnTheOtherLoops(RanksSuite):
    harness = partial(TcpPlaneHarness, loop="asyncio")
    loop_factory = uvloop.new_event_loop
