"""What `penstock simulate` and `penstock profile` show on a terminal while they run: a bar that moves."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

GRAPH = Path(__file__).parents[3] / "examples" / "graphs" / "8b-h100-x8.yaml"


def on_a_terminal(*arguments: object) -> str:
    """Give what a command wrote to stderr, a terminal of 120 columns, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    said = bytearray()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        try:
            while more := os.read(ours, 1 << 16):
                said += more
        except OSError:  # the other end is closed
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0, said.decode()
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", said.decode())


def test_a_simulation_shows_requests_and_virtual_time(tmp_path: Path) -> None:
    spec = tmp_path / "chat.yaml"
    spec.write_text("rate_per_s: 50\nrequests: 8000\n")
    said = on_a_terminal("simulate", spec, "--graph", GRAPH)
    ended = [int(number) for number in re.findall(r"8b-h100-x8: simulated .*?━.*?(\d+)/8000 ", said)]
    assert len(set(ended)) >= 3
    assert ended == sorted(ended)
    assert max(ended) > 4000


def test_a_profile_shows_cells(tmp_path: Path) -> None:
    flags = ("--quick", "--repeats", "1", "--max-seconds", "30")
    said = on_a_terminal("profile", "mock", *flags, "--out", tmp_path / "profile.json")
    shown = re.findall(r"(?:prefill|decode) [\dx ]+?━.*?(\d+)/(\d+) ", said.replace("╸", "━"))
    assert len(set(shown)) >= 3
    assert len({total for _, total in shown}) == 1
    assert (tmp_path / "profile.json").exists()
