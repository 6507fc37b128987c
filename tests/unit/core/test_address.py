import pytest

from penstock.core.address import Address
from penstock.core.errors import ConfigError


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
