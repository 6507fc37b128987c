"""NIXL between two agents of this process, over what UCX finds here. `make test` installs NIXL."""

import pytest

from penstock.testing.peer_transport import PeerTransportSuite
from penstock.testing.transports.harness import TwoAgents
from penstock.transfer.transports.nixl.transport import NixlTransport

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


class TestNixlTransport(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return TwoAgents(lambda: [NixlTransport()], size_bytes=size_bytes)
