"""Deployments that share the parent of their runtime directories, across process namespaces, and after a SIGKILL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_HOLD = """
import sys
from penstock.deploy.state import RuntimeDirectory
directory = RuntimeDirectory()
print(directory.path, flush=True)
sys.stdin.read()
"""
_START_AND_END = "from penstock.deploy.state import RuntimeDirectory; RuntimeDirectory().remove()"
_OTHER_PIDS = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


def start(environment):
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, Path(process.stdout.readline().strip())


@pytest.mark.needs("pid-namespaces")
def test_a_start_in_another_pid_namespace_leaves_what_lives_and_removes_what_was_killed(tmp_path):
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    living, its_path = start(environment)
    killed, left = start(environment)
    killed.kill()
    killed.communicate()
    subprocess.run([*_OTHER_PIDS, sys.executable, "-c", _START_AND_END], env=environment, check=True)
    assert its_path.is_dir()
    assert not left.exists()
    living.communicate()
