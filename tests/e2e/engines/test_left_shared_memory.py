"""Shared memory of an engine whose process group is killed goes with it, unless another process uses it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from penstock.deploy import group_file
from penstock.deploy.group_file import end_groups, keep_groups, remove_unused, segments_of, start_of
from penstock.deploy.supervisor.child import Child, GroupGuard
from penstock.deploy.supervisor.output import ProcessOutput

ENGINE = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=4096)
memory.buf[0] = 1
print(memory.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def engine() -> Iterator[tuple[int, Path]]:
    """A process group with a segment: its number, and the segment's path."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        path = Path("/dev/shm", process.stdout.readline().strip())
        try:
            assert segments_of([process.pid]) == {str(path)}
            assert not segments_of([os.getpgrp()])
            yield process.pid, path
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def by_the_file(group: int, directory: Path) -> None:
    keep_groups(directory, {group: start_of(group)})
    assert end_groups(directory) == 1


def by_the_guard(group: int, directory: Path) -> None:
    subprocess.run(
        [sys.executable, "-I", "-S", group_file.__file__],
        input=f"+{group}\n+1{group}\n-1{group}\n",
        text=True,
        check=True,
    )


@pytest.mark.parametrize("end", [by_the_file, by_the_guard])
def test_segments_of_a_killed_group_go(
    end: Callable[[int, Path], None], engine: tuple[int, Path], tmp_path: Path
) -> None:
    group, path = engine
    end(group, tmp_path)
    assert not path.exists()


def test_segments_of_a_process_that_ignores_sigterm_go_before_the_supervisors_loop_has_ended() -> None:
    async def scene() -> Path:
        reader, writer = await asyncio.open_connection(sock=ours)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ENGINE, stdout=subprocess.PIPE, process_group=0
        )
        assert process.stdout is not None
        name = (await process.stdout.readline()).decode().strip()
        child = Child(process, reader, writer, GroupGuard(), output.source("engine"))
        child.kill()
        assert await child.wait() == -signal.SIGKILL
        return Path("/dev/shm", name)

    ours, theirs = socket.socketpair()
    with theirs, ProcessOutput() as output:
        assert not asyncio.run(scene()).exists()


def test_segments_that_others_use_stay(engine: tuple[int, Path]) -> None:
    group, path = engine
    other = SharedMemory(name=path.name)
    os.killpg(group, signal.SIGKILL)
    remove_unused(frozenset({str(path)}))
    assert path.exists(), "this process uses it"
    other.close()
    remove_unused(frozenset({str(path)}))
    assert not path.exists()
    from multiprocessing.resource_tracker import unregister

    unregister(f"/{path.name}", "shared_memory")
