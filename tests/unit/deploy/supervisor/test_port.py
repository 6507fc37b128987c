import socket

import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.supervisor.frontends import Port, say_open


def test_a_port_of_zero_becomes_a_free_one_that_frontends_can_share() -> None:
    with Port("127.0.0.1", 0) as port:
        assert port.number > 0
        assert port.url() == f"http://127.0.0.1:{port.number}"
        with socket.socket() as one, socket.socket() as two:
            for frontend in (one, two):
                frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                frontend.bind((port.host, port.number))


def test_a_port_in_use_is_noticed_even_where_its_user_would_share() -> None:
    with Port("127.0.0.1", 0) as port, pytest.raises(ConfigError) as caught:
        Port("127.0.0.1", port.number)
    assert caught.value.message == (
        f"frontend.port: {port.number} on 127.0.0.1 is in use; stop what listens there, or choose another with --port"
    )


@pytest.mark.parametrize(
    ("host", "text"),
    [("192.0.2.1", "not an address of this machine"), ("no such host", "frontend.host: no such host: ")],
)
def test_a_wrong_host_is_one_line(host: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Port(host, 0)


def test_the_url_is_one_that_can_be_reached() -> None:
    with Port("0.0.0.0", 0) as port:
        assert port.url() == f"http://127.0.0.1:{port.number}"
    with Port("localhost", 0) as port:
        assert port.url().startswith("http://")


def test_an_open_port_that_others_reach_is_said() -> None:
    with Port("127.0.0.1", 0) as port:
        assert list(say_open(port, is_open=True)) == []
    with Port("0.0.0.0", 0) as port:
        assert list(say_open(port, is_open=False)) == []
        (line,) = say_open(port, is_open=True)
        assert line.startswith(f"0.0.0.0 port {port.number} answers whoever reaches it: no API key is set")
