"""Hosts of network namespaces on one bridge, with `penstock up` in each."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.frontend.servers import cpu_s
from penstock.core.errors import Unavailable
from penstock.deploy.identity import SECRET_VARIABLE

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_NETWORK = "10.213.78"


class Supervisor:
    """A running `penstock up`, and the processes under it."""

    def __init__(
        self, graph: dict[str, Any], folder: Path, *arguments: str, prefix: Sequence[str] = ()
    ) -> None:
        """Start it.

        Args:
            graph: of the deployment.
            folder: for its state.
            arguments: of the command, after the graph's file.
            prefix: what the command begins with, such as `ip netns exec NAME`.
        """
        folder.mkdir()
        file = folder / "graph.json"
        file.write_text(json.dumps(graph))
        folders = {"PENSTOCK_STATE_DIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "penstock", "up", str(file), *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ
            | folders
            | {SECRET_VARIABLE: "a secret of the chaos bench", "PENSTOCK_HOST": folder.name},
        )

    def wait_ready(self) -> str:
        """Wait until it serves; return the line that says so.

        Raises:
            Unavailable: it ended, or took too long.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            text = Path(self._log.name).read_text()
            for line in text.splitlines():
                if line.startswith("penstock") and " ready " in line:
                    return line
            if self._process.poll() is not None:
                raise Unavailable(f"penstock up ended with {self._process.returncode}: {text[-2000:]}")
            time.sleep(0.2)
        raise Unavailable(f"penstock up was not ready within {_START_TIMEOUT_S:g} s: {text[-2000:]}")

    def pids(self) -> dict[str, int]:
        """Its frontends and workers, by name."""
        found = {}
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        for pid in map(int, children.split()):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if words[-2].startswith(("worker-", "frontend-")):
                    found[words[-2]] = pid
        return found

    def cpu_s(self) -> float:
        """CPU seconds of all its processes that live."""
        return sum(cpu_s(pid) for pid in (self._process.pid, *self.pids().values()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill it by SIGKILL; its processes end with it."""
        self._process.kill()

    def close(self) -> None:
        """End it. Safe twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


class Hosts:
    """Namespaces 0 to `count - 1` on a bridge, which has an address of this process's own network."""

    def __init__(self, count: int) -> None:
        """Make nothing yet."""
        number = os.getpid()
        self.names = [f"penstock-{number}-{host}" for host in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.address = f"{_NETWORK}.254"
        self._bridge = f"psx{number}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            _ip("link", "add", self._bridge, "type", "bridge")
            self._stack.callback(_ip, "link", "delete", self._bridge)
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host, name in enumerate(self.names):
                _ip("netns", "add", name)
                self._stack.callback(_ip, "netns", "delete", name)
                outside = f"{self._bridge}p{host}"
                _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("link", "set", outside, "master", self._bridge, "up")
                _ip("-n", name, "address", "add", f"{self.address_of(host)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def address_of(self, host: int) -> str:
        return f"{_NETWORK}.{host + 1}"

    def up(self, host: int, graph: dict[str, Any], run: str) -> Supervisor:
        """Run a part of a deployment on a host until the context ends."""
        prefix = ("ip", "netns", "exec", self.names[host])
        supervisor = Supervisor(graph, self.folder / f"host-{host}", "--run", run, prefix=prefix)
        self._stack.callback(supervisor.close)
        return supervisor

    def cut(self, host: int) -> None:
        """Have nothing reach a host, nor leave it."""
        _ip("link", "set", f"{self._bridge}p{host}", "down")

    def silence(self, host: int) -> None:
        """Have nothing leave a host, which all others still reach: its frames go to a card that nobody has."""
        for other in (self.address, *(self.address_of(each) for each in range(len(self.names)))):
            if other != self.address_of(host):
                nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")
                _ip("-n", self.names[host], "neighbour", "replace", other, *nobody)

    def heal(self, host: int) -> None:
        """Undo both."""
        _ip("link", "set", f"{self._bridge}p{host}", "up")
        _ip("-n", self.names[host], "neighbour", "flush", "nud", "permanent", "dev", "eth0")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
