"""Puts load on a server with `load.c`, which is compiled first, and notes the server's CPU time meanwhile."""

import json
import random
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frontend.servers import Server, cpu_s
from penstock.core.errors import ConfigError, Unavailable

_SOURCE = Path(__file__).with_name("load.c")
_TIMEOUT_S = 600.0
_PATH = "/v1/chat/completions"
_WORDS = [
    "the",
    "of",
    "import",
    "return",
    "value",
    "self",
    "list",
    "data",
    "request",
    "token",
    "stream",
    "answer",
    "model",
    "worker",
    "router",
    "a",
    "to",
    "in",
    "is",
    "that",
]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Chats of one shape; each begins with a number of its own, or ends with it, so that workers have all before it.

    Words are twenty common ones, or `unseen`: new in every request.
    """

    output_tokens: int
    words: int = 150
    stream: bool = True
    number_last: bool = False
    unseen: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """Give a body, with marks where each request gets its number and unseen words."""
        rng = random.Random(self.words)
        text = " ".join("########" if self.unseen else rng.choice(_WORDS) for _ in range(self.words))
        return {
            "model": model,
            "messages": [
                {"role": "user", "content": f"{text} ########" if self.number_last else f"######## {text}"}
            ],
            "max_tokens": self.output_tokens,
            "min_tokens": self.output_tokens,
            "ignore_eos": True,
            "stream": self.stream,
        }


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the generator saw; `server_cpu_s` is the frontend's CPU time, `cpu_s` the generator's own.

    `events` counts server-sent events of all streams, `[DONE]` included.
    """

    answers: int
    seconds: float
    cpu_s: float
    failures: int
    failure: str
    events: int
    ttfb_ms_p50: float
    ttfb_ms_p99: float
    ttfb_ms_max: float
    answer_ms_p50: float
    answer_ms_p99: float
    answer_ms_max: float
    gap_ms_p50: float
    gap_ms_p99: float
    gap_ms_max: float
    server_cpu_s: float


class Load:
    """The compiled generator. It numbers requests, so that no prompt comes twice."""

    def __init__(self, directory: Path) -> None:
        """Compile it into a directory.

        Raises:
            ConfigError: there is no C compiler.
        """
        compiler = shutil.which("cc")
        if compiler is None:
            raise ConfigError(
                "cc: not found; install a C compiler (Debian: gcc), which compiles the load generator"
            )
        self._directory = directory
        self._binary = directory / "load"
        subprocess.run([compiler, "-O2", "-o", str(self._binary), str(_SOURCE)], check=True)
        self._next = 0

    def check(self, server: Server, prompts: Prompts) -> None:
        """Ask once, and see that an answer has as many tokens as it should: fewer would cost a server less.

        Raises:
            Unavailable: it has not.
        """
        body = json.dumps(prompts.body(server.model) | {"stream": False}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}{_PATH}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            tokens = json.load(answer)["usage"]["completion_tokens"]
        if tokens != prompts.output_tokens:
            raise Unavailable(
                f"{server.name}: an answer has {tokens} tokens, expected {prompts.output_tokens} as on the other side"
            )

    def run(self, server: Server, prompts: Prompts, connections: int, requests: int) -> Loaded:
        """Send requests over so many connections, and wait for all answers.

        Raises:
            Unavailable: nothing came for a minute.
        """
        before_s = cpu_s(server.pid)
        return self.loaded(server, self.start(server, prompts, connections, requests), before_s)

    def loaded(self, server: Server, process: subprocess.Popen[str], before_s: float) -> Loaded:
        """Wait for a started generator, the server's CPU seconds having been `before_s`.

        Raises:
            Unavailable: nothing came for a minute.
        """
        out, _ = process.communicate(timeout=_TIMEOUT_S)
        if process.returncode:
            raise Unavailable(f"{server.name}: the load generator ended with exit code {process.returncode}")
        return Loaded(**json.loads(out), server_cpu_s=cpu_s(server.pid) - before_s)

    def start(
        self, server: Server, prompts: Prompts, connections: int, requests: int
    ) -> subprocess.Popen[str]:
        """Start to send requests; `loaded` takes what it saw, after a SIGTERM or at its end."""
        body = self._directory / f"body-{self._next}.json"
        body.write_text(json.dumps(prompts.body(server.model)))
        words = [
            str(self._binary),
            str(server.port),
            _PATH,
            str(body),
            str(connections),
            str(requests),
            str(self._next),
        ]
        self._next += requests
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
