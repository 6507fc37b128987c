import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.supervisor.common import worker_address
from penstock.graph.runtime import RuntimeSpec


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({}, ("", "")),
        ({"listen": "tcp://10.0.0.5:0"}, ("tcp://10.0.0.5:0", "")),
        ({"listen": "tcp://0.0.0.0:0", "advertise": "gpu-5"}, ("tcp://0.0.0.0:0", "gpu-5")),
        ({"hub": "tcp://10.0.0.1:7400"}, ("tcp://10.0.0.1:0", "")),
        ({"join": "tcp://127.0.0.1:7400"}, ("tcp://127.0.0.1:0", "")),
        ({"join": "tcp://127.0.0.1:7400", "listen": "tcp://10.0.0.5:0"}, ("tcp://10.0.0.5:0", "")),
    ],
)
def test_workers_listen_where_others_reach_them(fields, address):
    assert worker_address(RuntimeSpec(**fields)) == address


@pytest.mark.parametrize("fields", [{"listen": "tcp://0.0.0.0:0"}, {"hub": "tcp://[::]:7400"}])
def test_every_address_is_none_to_register(fields):
    with pytest.raises(ConfigError, match=r"set runtime.advertise"):
        worker_address(RuntimeSpec(**fields))
