"""One client of a served model: asks a question, notes each token as it comes, and can kill the worker in the middle."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.processes.served import Served
from penstock.core.errors import Unavailable
from penstock.deploy.state import load_admin_token

_TIMEOUT_S = 120.0
_ADMIN_TIMEOUT_S = 10.0


class KvRead(msgspec.Struct):
    num_bytes: int = 0


class Load(msgspec.Struct):
    kv_reads: list[KvRead] = []
    kv_failures: int = 0
    onboarded_tokens: list[int] = []


class WorkerState(msgspec.Struct):
    pid: int
    condition: str
    open_requests: int = 0
    load: Load | None = None


class _Workers(msgspec.Struct):
    workers: list[WorkerState]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and its tokens as text with their bytes."""

    text: str
    tokens: tuple[str, ...]


class Asker:
    """Asks one question at a time. Not thread-safe."""

    def __init__(self, deployment: Served, output_tokens: int) -> None:
        self._deployment = deployment
        self._output_tokens = output_tokens
        self._admin_headers = {"Authorization": f"Bearer {load_admin_token()}"}

    def ask(self, question: str, *, kill_after: int | None = None) -> Answer:
        """Stream an answer, greedily.

        Args:
            question: the user's message.
            kill_after: number of tokens after which the worker that answers is killed; None: none is.

        Raises:
            Unavailable: it ends with an error.
        """
        text = ""
        tokens: list[str] = []
        busy: list[int] = []
        for choice in self._stream(question):
            text += choice["delta"].get("content") or ""
            sampled = (choice.get("logprobs") or {}).get("content") or ()
            tokens.extend(f"{token['token']} {token['bytes']}" for token in sampled)
            if kill_after is None or not tokens:
                continue
            if (
                not busy
            ):  # asked with the first token: at `kill_after` an answer of a fast engine would soon be over
                busy = [worker.pid for worker in self.workers() if worker.open_requests]
            if len(tokens) >= kill_after:
                kill_after = None
                for pid in busy:
                    os.kill(pid, signal.SIGKILL)
        return Answer(text, tuple(tokens))

    def workers(self) -> list[WorkerState]:
        """Get the router's view of all workers."""
        body = self._get("/admin/workers", self._admin_headers)
        return msgspec.json.decode(body, type=_Workers).workers

    def counts(self) -> dict[str, float]:
        """Get the metrics, each by its name with labels."""
        lines = self._get("/metrics", {}).decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def _stream(self, question: str) -> Iterator[dict[str, Any]]:
        http = self._connect(_TIMEOUT_S)
        body = {
            "model": self._deployment.model, "messages": [{"role": "user", "content": question}], "temperature": 0,
            "max_tokens": self._output_tokens, "stream": True, "logprobs": True,
        }  # fmt: skip
        try:
            headers = {"Content-Type": "application/json"}
            http.request("POST", "/v1/chat/completions", msgspec.json.encode(body), headers)
            response = http.getresponse()
            if response.status != 200:
                raise Unavailable(f"{question!r}: {response.status} {response.read(500).decode()}")
            while (line := response.readline().strip()) != b"data: [DONE]":
                if not line.startswith(b"data: "):
                    if response.isclosed():
                        raise Unavailable(f"{question!r}: the stream was cut")
                    continue
                chunk = msgspec.json.decode(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise Unavailable(f"{question!r}: {chunk['error'].get('message')}")
                yield from chunk["choices"]
        finally:
            http.close()

    def _get(self, path: str, headers: dict[str, str]) -> bytes:
        http = self._connect(_ADMIN_TIMEOUT_S)
        try:
            http.request("GET", path, headers=headers)
            return http.getresponse().read()
        finally:
            http.close()

    def _connect(self, timeout_s: float) -> HTTPConnection:
        parts = urlsplit(self._deployment.url)
        return HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
