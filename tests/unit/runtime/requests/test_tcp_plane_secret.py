"""A request plane that other machines reach has a secret."""

import pytest

from penstock.core.errors import ConfigError
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.tcp import TcpPlane


@pytest.mark.parametrize(
    "listen", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://10.0.0.1:7", "tcp://worker-0.pool:0"]
)
def test_an_address_that_others_reach_needs_a_secret(listen):
    with pytest.raises(
        ConfigError, match=r"without a secret anyone could send requests; give .* or listen on 127.0.0.1"
    ):
        TcpPlane(listen=listen)
    TcpPlane(Identity(secret=b"s"), listen=listen)


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://localhost:0", "unix:///run/w0.sock"])
def test_one_that_only_this_machine_reaches_needs_none(listen):
    TcpPlane(listen=listen)
