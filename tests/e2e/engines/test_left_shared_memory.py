"""Shared memory of an engine whose process group is killed goes with it, unless another process uses it."""

import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from penstock.deploy.supervisor.resources.left_shared_memory import remove_unused, segments_of

ENGINE = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
memory.buf[0] = 1
print(memory.name, flush=True)
time.sleep(600)
"""


def test_segments_of_a_killed_group_are_removed_once_nobody_uses_them() -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert engine.stdout is not None
    with engine.stdout:
        path = Path("/dev/shm", engine.stdout.readline().strip())
    try:
        assert segments_of(engine.pid) == {str(path)}
        assert not segments_of(os.getpgrp())
    finally:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
    assert path.exists(), "Python's own process that would remove it was killed too"
    other = SharedMemory(name=path.name)
    remove_unused(frozenset({str(path)}))
    assert path.exists(), "this process uses it"
    other.close()
    remove_unused(frozenset({str(path)}))
    assert not path.exists()
    from multiprocessing.resource_tracker import unregister

    unregister(f"/{path.name}", "shared_memory")
