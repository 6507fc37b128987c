"""A deployment for a bench to load: the `penstock serve` command itself, as a process of its own."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.bench import serve
from penstock.bench.report import BenchReport
from penstock.core.errors import Unavailable

_START_TIMEOUT_S = 600.0  # several vLLMs on two cores take minutes
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    model: str
    pid: int = 0

    def kill(self) -> None:
        """End it by SIGKILL; the kernel then kills its workers and frontends."""
        os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def served(*flags: str, spare_processes: int = 0) -> Iterator[Served]:
    """Run `penstock serve FLAGS --port 0` until the context ends.

    Args:
        flags: of the command.
        spare_processes: none where speed is measured, since their start would be measured as well.

    Raises:
        Unavailable: it did not become ready, or did not stop with exit code 0, unless it was killed.
    """
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        *flags,
        "--port",
        "0",
        "--set",
        f"supervision.spare_processes={spare_processes}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(_START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            ready = replace(_wait_ready(process), pid=process.pid)
            watchdog.cancel()
            yield ready
        finally:
            watchdog.cancel()
            _stop(process)
    if process.returncode not in {0, -signal.SIGKILL}:
        raise Unavailable(f"`penstock serve {' '.join(flags)}` ended with exit code {process.returncode}")


def put_load(server: Served, flags: Mapping[str, object]) -> BenchReport:
    """Run `penstock bench serve` against a server, with flags by name."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = {"url": server.url, "model": server.model, **flags}
    options = parser.parse_args([f"--{name}={value}" for name, value in flags.items()])
    options.quick = False
    return serve.run(options)


def _wait_ready(process: subprocess.Popen[str]) -> Served:
    """Read state changes, one a line, until the deployment's own says where it answers."""
    assert process.stdout is not None
    for line in process.stdout:
        name, state, *detail = line.split()
        if (name, state) == ("penstock", "ready"):
            return Served(url=detail[0], model=detail[detail.index("model") + 1])
    raise Unavailable("`penstock serve` ended before it was ready; its own words stand above")


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask it to drain, and read on so that it never waits for us."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
