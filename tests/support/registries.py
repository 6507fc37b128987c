"""Real registries of tests, each a process on a free port: etcd and NATS."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from penstock.transfer.config import TlsConfig

_START_TIMEOUT_S = 30.0
_ROOT = Path(__file__).parents[2]


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class RegistryServer:
    """A server program that can be killed, stopped and started again, with or without its data."""

    def __init__(
        self, *, host: str = "127.0.0.1", prefix: tuple[str, ...] = (), tls: TlsConfig | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            host: where it listens.
            prefix: what the command begins with, such as `ip netns exec NAME`.
            tls: its certificate, and the authority of its clients; None for no TLS.
        """
        self.tls = tls
        self.host = host
        self.port = free_port()
        self._prefix = prefix
        self._folder = Path(tempfile.mkdtemp(prefix="registry-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    def command(self, folder: Path) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *self.command(self._folder / "data")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            text = (self._folder / "log").read_text(errors="replace")
            assert self._process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.02)

    def _answers(self) -> bool:
        if self._prefix:  # of another network: its clients wait for it
            return True
        with socket.socket() as probe:
            return probe.connect_ex((self.host, self.port)) == 0

    @property
    def pid(self) -> int:
        assert self._process is not None, "started"
        return self._process.pid

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Delete its data, while it does not run."""
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def pause(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill it, and delete its files."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Nats(RegistryServer):
    """nats-server with JetStream."""

    @property
    def url(self) -> str:
        return f"{'tls' if self.tls else 'nats'}://{self.host}:{self.port}"

    def command(self, folder: Path) -> list[str]:
        command = ["nats-server", "-js", "-sd", str(folder), "-a", self.host, "-p", str(self.port)]
        if self.tls is not None:
            command += ["--tlsverify", "--tlscert", self.tls.certificate, "--tlskey", self.tls.key]
            command += ["--tlscacert", self.tls.authority]
        return command


class Etcd(RegistryServer):
    """etcd with ticks of 10 ms, so that leases may be as short as a second."""

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    def command(self, folder: Path) -> list[str]:
        peer = f"http://127.0.0.1:{free_port()}"
        command = [
            "etcd", "--data-dir", str(folder), "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--unsafe-no-fsync", "--heartbeat-interval", "10", "--election-timeout", "100", "--log-level", "warn",
        ]  # fmt: skip
        if self.tls is not None:
            command += ["--client-cert-auth", "--cert-file", self.tls.certificate, "--key-file", self.tls.key]
            command += ["--trusted-ca-file", self.tls.authority]
        return command

    def call(self, path: str, token: str = "", **body: Any) -> dict[str, Any]:
        """Call its JSON gateway."""
        request = urllib.request.Request(f"{self.url}/v3/{path}", data=json.dumps(body).encode())
        if token:
            request.add_header("Authorization", token)
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: dict[str, Any] = json.load(answer)
            return content


class ApiServer(RegistryServer):
    """The tests' API server of Kubernetes, in a process of its own; its data ends with it."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def command(self, folder: Path) -> list[str]:
        program = (sys.executable, "-m", "tests.support.registry_client", "serve")
        return ["env", f"PYTHONPATH={_ROOT}", *program, self._kind, self.url]

    _kind = "kubernetes"


class Hub(ApiServer):
    """The hub of a supervisor; its data ends with it."""

    _kind = "local"

    @property
    def url(self) -> str:
        return f"tcp://{self.host}:{self.port}"
