"""Hosts of network namespaces: `penstock up` in each, and clients."""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.deploy.secret import SECRET_VARIABLE
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE

ADMIN_TOKEN = "a" * 40
TIMEOUT_S = 90.0
TOKENS = 600
_LISTENING = "0A"  # a state in /proc/net/tcp


class Host:
    """One namespace: `penstock up` in it, and curl."""

    def __init__(self, name: str, folder: Path, stack: ExitStack) -> None:
        """Make its folder; what is started ends with `stack`."""
        self.name = name
        self.folder = folder
        self.clock: tuple[str, ...] = ()
        """What `penstock up` begins with, so that its clocks are others."""
        self.lines: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._stack = stack
        folder.mkdir()

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def environment(self, secret: str) -> dict[str, str]:
        folders = {"PENSTOCK_STATE_DIR": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder)}
        secrets = {SECRET_VARIABLE: secret, ADMIN_TOKEN_VARIABLE: ADMIN_TOKEN}
        return os.environ | folders | secrets | {"PENSTOCK_HOST": self.folder.name}

    def up(self, *arguments: str, secret: str = "a secret of both hosts") -> "subprocess.Popen[str]":
        """Start `penstock up`; `wait` reads what it says."""
        return self.start(*self.clock, sys.executable, "-m", "penstock", "up", *arguments, secret=secret)

    def start(
        self, *words: str, secret: str = "a secret of both hosts", cwd: Path | None = None
    ) -> "subprocess.Popen[str]":
        """Start a command; `wait` reads what it says."""
        process = subprocess.Popen(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=self.environment(secret),
        )
        self._stack.callback(self._end, process)
        lines: queue.Queue[str | None] = queue.Queue()
        output = process.stdout
        assert output is not None, "a pipe"

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        self._lines = lines
        return process

    def wait(self, pattern: str) -> str:
        """Wait for a line."""
        deadline = time.monotonic() + TIMEOUT_S
        while (line := self._lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return line
        raise AssertionError(f"ended without {pattern!r}: {self.lines}")

    def get(self, url: str) -> Any:
        return json.loads(self.text(url))

    def text(self, url: str) -> str:
        header = f"Authorization: Bearer {ADMIN_TOKEN}"
        command = self.command("curl", "-sS", "-H", header, url)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def penstock(self, *arguments: str) -> str:
        """Run a command of Penstock to its end; give what it printed."""
        words = self.command(sys.executable, "-m", "penstock", *arguments)
        done = subprocess.run(
            words, check=True, capture_output=True, text=True, env=self.environment("a secret of both hosts")
        )
        return done.stdout

    def stream(self, url: str, max_tokens: int = TOKENS, content: str = "Tell me") -> "subprocess.Popen[str]":
        """Begin a seeded stream."""
        body = {
            "model": "penstock-demo", "messages": [{"role": "user", "content": content}], "seed": 7,
            "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        words = ("curl", "-sSN", "-H", "Content-Type: application/json", "-d", json.dumps(body))
        process = subprocess.Popen(
            self.command(*words, f"{url}/v1/chat/completions"), stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(process.kill)
        return process

    def listening_ports(self) -> set[int]:
        """Give the TCP ports on which processes of this host listen."""
        tables = self.command("cat", "/proc/net/tcp", "/proc/net/tcp6")
        done = subprocess.run(tables, check=True, capture_output=True, text=True)
        rows = [line.split() for line in done.stdout.splitlines()]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING}

    @staticmethod
    def _end(process: "subprocess.Popen[str]") -> None:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=TIMEOUT_S)
        finally:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()


def text_of(stream: "subprocess.Popen[str]") -> tuple[str, int]:
    """Wait for a stream's end; return its text and the number of tokens."""
    out, _ = stream.communicate(timeout=TIMEOUT_S)
    events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
    assert all("error" not in event for event in events), out[-500:]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text, events[-1]["usage"]["completion_tokens"]


def until(holds: Callable[[], object]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
