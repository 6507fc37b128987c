"""`penstock up` and other commands as processes of their own, in private directories."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.commands import TIMEOUT_S, Commands, end

__all__ = ["TIMEOUT_S", "Up"]


class Up(Commands):
    """Commands of one user of a host; `up` starts a deployment."""

    def __init__(self, folder: Path, runtime_dir: Path) -> None:
        """Keep graphs in `folder`."""
        super().__init__()
        self.folder = folder
        self.python: str | Path = sys.executable
        """Runs the commands."""
        self.environment = os.environ | {
            "XDG_RUNTIME_DIR": str(runtime_dir),
            "PENSTOCK_STATE_DIR": str(folder / "state"),
        }
        self._started: list[subprocess.Popen[str]] = []
        self._others: list[subprocess.Popen[bytes]] = []

    def graph(self, file: str = "graph.yaml", **fields: Any) -> Path:
        """Write a graph of the demo model with mock engines; `fields` are its own."""
        base = {
            "model": "demo",
            "frontend": {"port": 0},
            "supervision": {"spare_processes": 0},
            "roles": {"aggregated": {"engine": "mock"}},
        }
        path = self.folder / file
        path.write_text(yaml.safe_dump(base | fields))
        return path

    def run(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self._command(*arguments),
            env=self.environment,
            cwd=self.folder,
            text=True,
            capture_output=True,
            check=check,
            timeout=TIMEOUT_S,
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a command; its output is read by `wait`."""
        process = self.spawn(self._command(*arguments), environment=self.environment, cwd=self.folder)
        self._started.append(process)
        return process

    def up(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a deployment and wait until it is ready; `url` is its URL."""
        process = self.start("up", *arguments)
        ready = re.search(r"(https?://\S+)", self.wait(r"^penstock +ready"))
        self.url = "" if ready is None else ready[1]
        return process

    def ended(self) -> int:
        """Wait for the end of what was started last; returns its status. `lines` then has all that it said."""
        while (line := self._lines.get(timeout=TIMEOUT_S)) is not None:
            self.lines.append(line.rstrip())
        return self._started[-1].wait(timeout=TIMEOUT_S)

    def ps(self, name: str | None = None) -> list[dict[str, Any]]:
        """Give what `penstock ps --json` says."""
        said = self.run("ps", "--json", *(() if name is None else ("--name", name)))
        found: list[dict[str, Any]] = json.loads(said.stdout)
        return found

    def start_in_group(self, group: int) -> subprocess.Popen[bytes]:
        """Start a program that sleeps, in the process group of another process, as an engine's processes are."""
        process = subprocess.Popen(["sleep", "600"], process_group=group)
        self._others.append(process)
        return process

    def end(self) -> None:
        """End what still runs."""
        for other in self._others:
            other.kill()
            other.wait()
        for process in self._started:
            end(process)

    def _command(self, *arguments: str | Path) -> list[str]:
        return [str(self.python), "-m", "penstock", *map(str, arguments)]
