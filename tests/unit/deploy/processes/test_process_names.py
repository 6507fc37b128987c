"""Operators tell processes apart by their names in `ps`."""

import threading
from pathlib import Path

from penstock.deploy.processes.process import _set_name
from penstock.deploy.supervisor.child import command_line


def test_a_command_line_ends_with_the_name():
    assert command_line(19, "worker-1", [])[-2:] == ["19", "worker-1"]
    assert command_line(19, "spare", ["torch"])[-3:] == ["19", "spare", "torch"]


def test_a_spare_gets_its_name_when_assigned():
    names = []

    def rename():
        _set_name("worker-2")
        names.append(Path("/proc/thread-self/comm").read_text(encoding="utf-8").strip())

    thread = threading.Thread(target=rename)
    thread.start()
    thread.join()
    assert names == ["worker-2"]
