"""Hosts of network namespaces: `penstock up` in each, and clients."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.deploy.identity import SECRET_VARIABLE
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from tests.support.commands import TIMEOUT_S, Commands, end, stream_words, text_of, until

__all__ = ["ADMIN_TOKEN", "TIMEOUT_S", "TOKENS", "Host", "text_of", "until"]
ADMIN_TOKEN = "a" * 40
TOKENS = 600
_LISTENING = "0A"  # a state in /proc/net/tcp


class Host(Commands):
    """One namespace: `penstock up` in it, and curl."""

    def __init__(self, name: str, folder: Path, stack: ExitStack) -> None:
        """Make its folder; what is started ends with `stack`."""
        super().__init__()
        self.name = name
        self.folder = folder
        self.clock: tuple[str, ...] = ()
        """What `penstock up` begins with, so that its clocks are others."""
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
        process = self.spawn(self.command(*words), environment=self.environment(secret), cwd=cwd)
        self._stack.callback(end, process)
        return process

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
        words = self.command(*stream_words(url, max_tokens, content))
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._stack.callback(process.kill)
        return process

    def listening_ports(self) -> set[int]:
        """Give the TCP ports on which processes of this host listen."""
        tables = self.command("cat", "/proc/net/tcp", "/proc/net/tcp6")
        done = subprocess.run(tables, check=True, capture_output=True, text=True)
        rows = [line.split() for line in done.stdout.splitlines()]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING}
