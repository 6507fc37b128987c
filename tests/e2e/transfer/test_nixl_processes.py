"""NIXL between two processes, one of which is killed; over UCX's copies between processes, and over its TCP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
UCX_OVER_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
_PAIR = Path(__file__).parents[1] / "helpers" / "nixl_pair.py"


@pytest.mark.parametrize(
    "ucx", [pytest.param({}, id="cma"), pytest.param(UCX_OVER_TCP, id="tcp", marks=pytest.mark.nightly)]
)
def test_bytes_arrive_and_a_killed_peer_is_an_error_without_a_heartbeat(ucx: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, _PAIR],
        env=os.environ | ucx,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["is_equal"]
    assert seen["errors"] == ["PeerLost"]
    assert seen["under_way"] == 0
