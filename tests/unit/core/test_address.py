import pytest

from penstock.core.errors import ConfigError
from penstock.core.listening import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:5000", Address(host="127.0.0.1", port=5000)),
        ("tcp://worker-0.pool:0", Address(host="worker-0.pool", port=0)),
        ("tcp://[::1]:5000", Address(host="::1", port=5000)),
        ("unix:///run/penstock/w0.sock", Address(path="/run/penstock/w0.sock")),
    ],
)
def test_addresses_are_read_and_written(text, address):
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:5000",
        "tcp://:5000",
        "tcp://h",
        "tcp://h:x",
        "tcp://h:99999",
        "tcp://h:1/p",
        "unix://p",
        "ftp://h:1",
    ],
)
def test_what_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"listen: .*expected tcp://HOST:PORT or unix:///PATH"):
        Address.parse(text, source="listen")


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.8.9.1:0", True),
        ("tcp://[::1]:0", True),
        ("tcp://localhost:0", True),
        ("unix:///run/w0.sock", True),
        ("tcp://0.0.0.0:0", False),
        ("tcp://[::]:0", False),
        ("tcp://10.0.0.1:0", False),
        ("tcp://worker-0.pool:0", False),
    ],
)
def test_an_address_tells_whether_other_machines_reach_it(text, is_local):
    assert Address.parse(text).is_local is is_local
