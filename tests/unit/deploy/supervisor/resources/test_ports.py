"""Which ports workers listen on."""

import pytest

from penstock.core.errors import RequestError
from penstock.deploy.supervisor.resources.ports import PortRange, Ports


def test_each_worker_has_two_ports_and_freed_ones_are_given_again():
    ports = Ports(PortRange.parse("7500-7504"))
    assert ports.room() == 2
    assert ports.take("a") == (7500, 7501)
    assert ports.take("b") == (7502, 7503)
    assert ports.room() == 0
    with pytest.raises(
        RequestError, match=r"c needs 2 ports, and runtime.ports 7500-7504 has 5 for 2 workers"
    ):
        ports.take("c")
    ports.release("a")
    assert ports.take("c") == (7500, 7501)


def test_without_a_range_any_port_is_free():
    ports = Ports(None)
    assert (ports.take("a"), ports.room()) == ((), None)
    ports.release("a")
