"""One member of a deployment, such as `worker-1`: a name under which one process runs after another."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.backoff import Backoff
from penstock.deploy.child import describe_status
from penstock.deploy.messages import Assignment, Failed, Ready, Report
from penstock.graph import Supervision

_LAST_WORDS_S = (
    1.0  # a dead child's reports are in the socket already, unless a process it forked holds it open
)


class ChildProcess(Protocol):
    """What a member needs of a `Child`."""

    @property
    def pid(self) -> int: ...
    async def report(self) -> Report | None: ...
    async def wait(self) -> int: ...
    def signal(self, number: signal.Signals) -> None: ...
    def kill(self) -> None: ...


@dataclass(slots=True, frozen=True)
class _Ending:
    why: str
    config: bool
    served_s: float | None


class Member:
    """Keeps one process running until told to stop. One task runs it; the rest may be called on the same loop."""

    def __init__(
        self,
        name: str,
        assign: Callable[[], Assignment],
        settings: Supervision,
        *,
        start: Callable[[Assignment], Awaitable[ChildProcess]],
        say: Callable[[str, str, str], None],
    ) -> None:
        """Prepare a member.

        Args:
            name: for people, such as `worker-1`.
            assign: makes the assignment of the next process.
            settings: delays and patience.
            start: starts a process.
            say: hears of every change of state, as name, state and detail.
        """
        self.name = name
        self.ready = asyncio.Event()
        self.may_give_up: Callable[[], bool] = lambda: True
        """Asked when it failed to start too often: False while the deployment serves without this member."""
        self.may_refuse: Callable[[], bool] = lambda: True
        """Asked when its settings cannot work: False once the deployment has started, while it serves without this member."""
        self._assign = assign
        self._settings = settings
        self._start = start
        self._say = say
        self._child: ChildProcess | None = None
        self._ready_at = 0.0
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def run(self) -> None:
        """Run until `stop`, starting a new process whenever one ends.

        Raises:
            ConfigError: the process says that its settings cannot work.
            Unavailable: it failed to start too often in a row.
        """
        backoff = Backoff(self._settings)
        while not self._stopping.is_set():
            ending = await self._run_process()
            if self._stopping.is_set():
                self._say(self.name, "stopped", "")
                return
            if ending.config and self.may_refuse():
                raise ConfigError(ending.why)
            delay_s = backoff.delay_s(ending.served_s)
            if backoff.failed_starts >= self._settings.failed_starts_max and self.may_give_up():
                raise Unavailable(
                    f"{self.name}: failed to start {backoff.failed_starts} times in a row, at last: {ending.why};"
                    " --log-level debug shows more"
                )
            self._say(self.name, "failed", f"{ending.why}; starts again in {delay_s:.1f} s")
            await self._sleep(delay_s)

    def stop(self) -> None:
        """Have the process finish what it has and end; none follows."""
        if not self._stopping.is_set():
            self._stopping.set()
            if self._child and self.ready.is_set():
                self._child.signal(signal.SIGTERM)
            elif self._child:  # it has nothing yet, and may be busy loading a model
                self._child.kill()

    def kill(self) -> None:
        """End the process at once; none follows."""
        self._stopping.set()
        if self._child:
            self._child.kill()

    async def _sleep(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _run_process(self) -> _Ending:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        child = await self._start(self._assign())
        self._child = child
        if self._stopping.is_set():  # told while the process was being made
            child.kill()
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen(child, started_at))
                status = await child.wait()
                try:
                    async with asyncio.timeout(_LAST_WORDS_S):
                        failed = await listening
                except TimeoutError:
                    failed = None
        finally:
            served_s = loop.time() - self._ready_at if self.ready.is_set() else None
            self.ready.clear()
            child.kill()
            await child.wait()
            self._child = None
        if failed is None:
            return _Ending(describe_status(status), config=False, served_s=served_s)
        return _Ending(failed.message, config=failed.config, served_s=served_s)

    async def _listen(self, child: ChildProcess, started_at: float) -> Failed | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                report = await child.report()
        except TimeoutError:
            child.kill()
            return Failed(message=f"not ready {self._settings.start_timeout_s:g} s after its start")
        if isinstance(report, Ready):
            self._ready_at = loop.time()
            self.ready.set()
            self._say(self.name, "ready", f"{report.detail}  {self._ready_at - started_at:.1f} s")
            report = await child.report()
        return report if isinstance(report, Failed) else None
