"""What an engine takes from its host, and the names that stand for it."""

import socket
import stat
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.launch import SymbolicHost, ThisHost


def test_directories_are_private_short_and_removed(tmp_path: Path) -> None:
    host = ThisHost({"XDG_RUNTIME_DIR": f"{tmp_path}/{'long' * 20}"})
    made = Path(host.directory("x-"))
    assert made.name.startswith("x-")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert len(str(made)) < 60, "a socket in it has to have a path of 107 bytes"
    (made / "socket").touch()
    host.close()
    host.close()
    assert not made.exists()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    missing = Path("/tmp/none") if len(str(tmp_path)) > 50 else tmp_path / "none"
    with pytest.raises(
        ConfigError, match=r"cannot make a private directory there: no such file.*XDG_RUNTIME"
    ):
        ThisHost({"XDG_RUNTIME_DIR": str(missing)}).directory("x-")


def test_ports_are_free_and_successive() -> None:
    host = ThisHost({})
    ports = [int(port) for port in host.ports("port", 3, address="127.0.0.1")]
    assert ports == list(range(ports[0], ports[0] + 3))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        assert int(host.ports("port", address="127.0.0.1", first=first)[0]) > first
    with pytest.raises(ConfigError, match="port: no 2 successive free TCP ports on this host from 65535 on"):
        host.ports("port", 2, first=65535)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is no address of this machine"):
        host.ports("port", address="192.0.2.1")


def test_symbols_are_found_nowhere() -> None:
    host = SymbolicHost()

    def read() -> str:
        raise AssertionError

    assert host.variables == {}
    assert host.ports("port", 3) == ["<port>", "<port + 1>", "<port + 2>"]
    assert host.read("address", read) == "<address>"
    assert host.directory("x-") == "<directory x-*>"
