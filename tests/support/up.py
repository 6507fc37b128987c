"""`penstock up` and other commands as processes of their own, in private directories."""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

TIMEOUT_S = 90.0


class Up:
    """Commands of one user of a host; `up` starts a deployment."""

    def __init__(self, folder: Path, runtime_dir: Path) -> None:
        """Keep graphs in `folder`."""
        self.folder = folder
        self.python: str | Path = sys.executable
        """Runs the commands."""
        self.environment = os.environ | {
            "XDG_RUNTIME_DIR": str(runtime_dir),
            "PENSTOCK_STATE_DIR": str(folder / "state"),
        }
        self.lines: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
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
        process = subprocess.Popen(
            self._command(*arguments),
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._started.append(process)
        lines = self._lines = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        return process

    def up(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a deployment and wait until it is ready; `url` is its URL."""
        process = self.start("up", *arguments)
        ready = re.search(r"(https?://\S+)", self.wait(r"^penstock +ready"))
        self.url = "" if ready is None else ready[1]
        return process

    def wait(self, pattern: str) -> str:
        """Wait for a line of what was started last."""
        deadline = time.monotonic() + TIMEOUT_S
        with suppress(queue.Empty):
            while (line := self._lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
                self.lines.append(line.rstrip())
                if re.search(pattern, line):
                    return line
        raise AssertionError(f"ended or waited without {pattern!r}: {self.lines}")

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
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(timeout=TIMEOUT_S)
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()

    def _command(self, *arguments: str | Path) -> list[str]:
        return [str(self.python), "-m", "penstock", *map(str, arguments)]
