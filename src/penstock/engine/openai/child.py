"""A server of SGLang or TensorRT-LLM as a child of the worker: its command, its start, and its end."""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError, EngineError, PenstockError
from penstock.core.types.instances import EngineInfo
from penstock.engine.child_output import PrintedLines
from penstock.engine.launch import ThisHost
from penstock.engine.openai.config import HealthConfig, ServerConfig
from penstock.engine.openai.engine import Serving
from penstock.engine.openai.paired import PairedServerEngine
from penstock.engine.openai.server import EngineServer

_END_S = 10.0
"""Longest seconds from SIGTERM to SIGKILL."""
_READ_S = 1.0
"""Longest seconds for the last lines of a process that has ended: its children may hold the pipe."""
_POLL_S = 0.2
HEALTH = HealthConfig(timeout_s=60.0)
"""Of a server that starts: its first request may compile kernels. The end of its process is noticed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started.

    Attributes:
        engine: the engine's name, for the log and errors.
        words: program and arguments.
        environment: variables beside those of this process.
        url: where the server answers.
        api_key: that the server asks for; None: none.
        spans_nodes: whether its ranks are on several nodes: its end may then be another node's.
    """

    engine: str
    words: Sequence[str]
    url: str
    environment: Mapping[str, str]
    api_key: str | None = None
    spans_nodes: bool = False


class ServerProcess:
    """A server's process, in the process group of the worker: whatever ends the group ends it."""

    def __init__(self, command: ServerCommand) -> None:
        """Make it; `start` starts the process."""
        self.command = command
        self.ended: Future[str] = Future()
        """Done with the reason once the process has ended."""
        self._lines = PrintedLines(command.engine)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; further calls do nothing.

        Raises:
            ConfigError: there is no such program.
        """
        if self._process is not None:
            return
        command = self.command
        try:
            self._process = process = subprocess.Popen(  # noqa: S603 - the engine's own program
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.environment},
            )
        except OSError as error:
            raise ConfigError(
                f"engine {command.engine}: cannot run {command.words[0]}: {error.strerror}; install the engine anew"
            ) from error
        threading.Thread(target=self._watch, args=(process,), daemon=True, name="server process").start()

    def has_answered(self) -> None:
        """Forget what was printed so far: it explains no later failure."""
        self._lines.forget()

    def end(self) -> None:
        """End the process and wait for it; safe before `start`, and twice."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        wait([self.ended], 2 * _READ_S)

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None, "a pipe"
        reading = threading.Thread(
            target=self._lines.read,
            args=(os.dup(process.stdout.fileno()),),
            daemon=True,
            name="server output",
        )
        process.stdout.close()
        reading.start()
        code = process.wait()
        reading.join(_READ_S)
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        self.ended.set_result(self._lines.reason() or self._lines.last or how)


class ChildServerEngine(PairedServerEngine):
    """An engine whose server is a child of this process. The worker ends with it."""

    def __init__(
        self,
        process: ServerProcess,
        host: ThisHost,
        server: EngineServer,
        config: ServerConfig,
        serving: Serving,
    ) -> None:
        """Make an engine; `start` starts the server.

        Args:
            process: of the server.
            host: gave the server ports and directories, which `close` removes.
            server: where it will answer.
            config: how it is asked.
            serving: the deployment's settings of the worker.
        """
        super().__init__(server, config, serving)
        self._process = process
        self._host = host

    async def start(self) -> EngineInfo:
        """Start the server, wait until it is healthy, then check it as a running server.

        Raises:
            ConfigError: the server cannot be started, or ends: its last error says why.
            EngineError: the same of a server over several nodes.
            WrongServerError: its tokenizer or block size is not the model's.
        """
        if self._info is not None:
            return self._info
        self._process.start()
        await self._until_healthy()
        info = await super().start()
        self._process.has_answered()
        return info

    async def _until_healthy(self) -> None:
        ended, command = self._process.ended, self._process.command
        while not ended.done():
            try:
                await self._server.connection.get("/health", timeout_s=HEALTH.timeout_s)
            except PenstockError:
                await asyncio.sleep(_POLL_S)
            else:
                return
        raise start_error(command, ended.result())

    async def _watch_server(self) -> None:
        reason = await asyncio.shield(asyncio.wrap_future(self._process.ended))
        self._died(EngineError(f"{self._process.command.engine}: its server ended: {reason}"))

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._process.end)
        self._host.close()


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Write arguments as a command line: `tp_size` becomes `--tp-size`.

    True is the flag alone, and False leaves it out. A list is several words, a mapping is JSON.
    """
    words: list[str] = []
    for name, value in arguments.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += [_word(each) for each in (value if isinstance(value, list | tuple) else (value,))]
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def start_error(command: ServerCommand, reason: str) -> PenstockError:
    """Make the error of a server that ended before it answered. A server over several nodes may have lost a node, and is tried again."""
    kind = EngineError if command.spans_nodes else ConfigError
    return kind(
        f"engine {command.engine}: its server did not start: {reason}; --log-level debug shows all that it printed, and engine_args"
        " sets its arguments"
    )
