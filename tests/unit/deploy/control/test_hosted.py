"""Which deployment of a host a command means, which of them lives, and which frontend and certificate a command takes."""

import os
import tempfile
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.control.hosted import (
    DeploymentOrigin,
    DeploymentRecord,
    SupervisorProcess,
    choose,
    hosted,
    keep_record,
)
from penstock.deploy.control.local_connector import FrontendAddress, find_frontend
from penstock.deploy.group_file import keep_groups, living_groups, start_of
from penstock.deploy.state import RuntimeDirectory

BLUE, GREEN = "http://127.0.0.1:9001", "https://127.0.0.1:9002"


@pytest.fixture
def place(monkeypatch):
    """Give a function that makes the private directory of a deployment; its path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="p-") as parent:
        monkeypatch.setenv("XDG_RUNTIME_DIR", parent)
        made = []

        def make(name, *, here=False, part=None, graph=None, pid=None, has_origin=True, **fields):
            directory = RuntimeDirectory()
            where = str(Path.cwd()) if here else "/elsewhere"
            origin = DeploymentOrigin(file=f"/graphs/{graph or name}.yaml", directory=where, part=part)
            record = DeploymentRecord(
                name=name,
                pid=pid or os.getpid(),
                started_s=1.0,
                stop_s_max=2.0,
                origin=origin if has_origin else None,
                **fields,
            )
            keep_record(directory.path, record)
            made.append(directory)
            return directory.path

        yield make
        for directory in made:
            directory.remove()


def kill(path):
    """Have nobody hold a directory's lock, as after a kill."""
    (path / "lock").rename(path / "lock-of-the-killed")
    (path / "lock").touch()


def test_the_living_come_first_and_the_directories_of_the_killed_are_removed(place):
    alive, killed = place("b"), place("a")
    kill(killed)
    living, dead = hosted()
    assert [(each.directory, each.name, each.is_live) for each in (living, dead)] == [
        (alive, "b", True),
        (killed, "a", False),
    ]
    assert (living.still_runs(), dead.still_runs()) == (True, False)
    assert (dead.clean(), living.clean()) == (0, None)
    assert (killed.exists(), alive.exists()) == (False, True)
    assert dead.clean() is None


def test_one_is_chosen_by_its_file_its_name_or_this_directory(place):
    place("blue")
    place("green", here=True)
    found = hosted()
    assert choose(found, file=Path("/graphs/blue.yaml")).name == "blue"
    assert choose(found, name="blue").name == "blue"
    assert choose(found).name == "green", "of this directory"
    with pytest.raises(Unavailable, match=r"called red .*blue of /graphs/blue.yaml, green of"):
        choose(found, name="red")
    place("green", here=True, graph="green2")
    said = r"2 deployments fit: green of /graphs/green.yaml .*, green of /graphs/green2"
    with pytest.raises(ConfigError, match=said):
        choose(hosted(), name="green")


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"has_origin": False}, ConfigError, "runs within a program"),
        ({"pid": 1}, Unavailable, "process 1 of this host is not its supervisor"),
    ],
)
def test_who_is_not_its_supervisor_gets_no_signal(place, fields, error, said):
    place("other", **fields)
    with pytest.raises(error, match=said), SupervisorProcess.of(hosted()[0]):
        pass


def test_a_group_whose_number_another_program_has_is_not_ours(tmp_path):
    group = os.getpgrp()
    started = start_of(group) if start_of(group) is not None else 1
    keep_groups(tmp_path, {group: started})
    assert living_groups(tmp_path) == [group]
    keep_groups(tmp_path, {group: started + 1, 2**22 + 1: 5})
    assert living_groups(tmp_path) == ([] if start_of(group) is not None else [group])
    (tmp_path / "groups").write_text("no numbers\n")
    assert living_groups(tmp_path) == living_groups(tmp_path / "absent") == []


def test_without_a_deployment_a_frontend_is_at_port_8000(place):
    assert find_frontend(None) == FrontendAddress("http://127.0.0.1:8000", is_guess=True)
    place("workers")
    assert find_frontend(None).is_guess, "workers alone have no frontend"
    assert find_frontend("http://a:1/v1/") == FrontendAddress("http://a:1")


def test_a_part_without_frontends_says_so(place):
    place("chat", url=BLUE, part="frontend")
    place("chat", part="decode")
    assert find_frontend(None, name="chat").url == BLUE
    with pytest.raises(Unavailable, match="chat: no frontend of it runs on this host; name one of another"):
        find_frontend(None, part="decode")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://a:b", "http://a:99999", "http://[::1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"--url: .*expected a URL such as http"):
        find_frontend(url)
