"""Which deployment of a host a command means, and which of them lives."""

import os
import re
import tempfile
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.control.hosted import Supervisor, choose, hosted
from penstock.deploy.control.record import DeploymentRecord, Origin, keep_record
from penstock.deploy.group_file import keep_groups, living_groups, start_of
from penstock.deploy.state import RuntimeDirectory

NO_ORIGIN = None


@pytest.fixture
def short_path():
    """Give a directory whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="p-") as name:
        yield Path(name)


@pytest.fixture
def place(short_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    made = []

    def make(name, origin=NO_ORIGIN, *, lives=True):
        directory = RuntimeDirectory()
        record = DeploymentRecord(name=name, pid=os.getpid(), started_s=1.0, stop_s_max=2.0, origin=origin)
        keep_record(directory.path, record)
        if lives:
            made.append(directory)
        else:
            os.close(directory._lock)  # as the kernel does after a kill
        return directory.path

    yield make
    for directory in made:
        directory.remove()


def origin(name, directory="/elsewhere", part=None):
    return Origin(file=f"/graphs/{name}.yaml", directory=directory, part=part)


def test_the_living_come_first_and_the_killed_are_told_by_their_lock(place):
    alive, killed = place("b"), place("a", lives=False)  # a start removes what was killed before
    assert [(each.directory, each.name, each.is_live) for each in hosted()] == [
        (alive, "b", True),
        (killed, "a", False),
    ]
    assert hosted()[0].still_runs()
    assert not hosted()[1].still_runs()


def test_a_killed_deployments_directory_is_removed_and_a_living_ones_is_not(place):
    alive, killed = place("b"), place("a", lives=False)  # a start removes what was killed before
    living, dead = hosted()
    assert dead.clean() == 0
    assert living.clean() is None
    assert not killed.exists()
    assert alive.exists()
    assert dead.clean() is None


def test_one_is_chosen_by_its_file_its_name_or_this_directory(place):
    place("blue", origin("blue"))
    place("green", origin("green", str(Path.cwd())))
    found = hosted()
    assert choose(found, file=Path("/graphs/blue.yaml")).name == "blue"
    assert choose(found, name="blue").name == "blue"
    assert choose(found).name == "green", "of this directory"
    with pytest.raises(Unavailable, match=r"called red .*blue of /graphs/blue.yaml, green of"):
        choose(found, name="red")
    place("green", origin("green2", str(Path.cwd())))
    with pytest.raises(
        ConfigError, match=r"2 deployments fit: green of /graphs/green.yaml .*, green of /graphs/green2"
    ):
        choose(hosted(), name="green")


def test_parts_of_one_deployment_are_told_apart(place):
    paths = [
        place("chat", origin("chat", str(Path.cwd()), part))
        for part in (None, "aggregated=2", "prefill, decode")
    ]
    found = hosted()
    parts = ["all", "aggregated", "decode,prefill"]
    assert [choose(found, name="chat", part=part).directory for part in parts] == paths
    listed = f"chat of /graphs/chat.yaml (--part aggregated=2, or {os.getpid()})"
    with pytest.raises(ConfigError, match=re.escape(listed)):
        choose(found, name="chat")
    with pytest.raises(ConfigError, match="3 deployments fit"):
        choose(found, part=str(os.getpid()))
    with pytest.raises(Unavailable, match="called chat with --part decode of this user"):
        choose(found, name="chat", part="decode")


def test_a_program_of_somebodys_own_gets_no_signal(place):
    place("inside")
    with pytest.raises(ConfigError, match="runs within a program"), Supervisor.of(hosted()[0]):
        pass


def test_a_process_that_does_not_hold_the_lock_gets_no_signal(place):
    path = place("moved", origin("moved"))
    keep_record(
        path, DeploymentRecord(name="moved", pid=1, started_s=1.0, stop_s_max=2.0, origin=origin("moved"))
    )
    with (
        pytest.raises(Unavailable, match="process 1 of this host is not its supervisor"),
        Supervisor.of(hosted()[0]),
    ):
        pass


def test_a_group_whose_number_another_program_has_is_not_ours(tmp_path):
    group = os.getpgrp()
    started = start_of(group) if start_of(group) is not None else 1
    keep_groups(tmp_path, {group: started})
    assert living_groups(tmp_path) == [group]
    keep_groups(tmp_path, {group: started + 1, 2**22 + 1: 5})
    assert living_groups(tmp_path) == ([] if start_of(group) is not None else [group])
    (tmp_path / "groups").write_text("no numbers\n")
    assert living_groups(tmp_path) == []
    assert living_groups(tmp_path / "absent") == []
