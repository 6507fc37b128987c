"""The example is as short as it is said to be, and does what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "transfer.py"


@pytest.mark.slow
def test_two_processes_exchange_blocks_in_forty_lines() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "read blocks full of [ 7 50 21] by shm\n", done.stderr
    assert done.stderr == "reader says written: block 3 is full of 99\n"
    assert len(EXAMPLE.read_text().splitlines()) <= 40
