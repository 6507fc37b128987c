"""One member of a deployment, such as `worker-1`: a name under which one process runs after another."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.messages import Assignment, Beat, Failed, ProcessFailed, Ready, Report
from penstock.deploy.supervisor.backoff import Backoff
from penstock.deploy.supervisor.child import describe_status
from penstock.deploy.supervisor.watchdog import Watchdog
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
    def tell(self, news: ProcessFailed) -> None: ...
    def signal(self, number: signal.Signals) -> None: ...
    def kill(self) -> None: ...
    def kill_at_once(self) -> None: ...


_CONFIG = "config"


@dataclass(slots=True, frozen=True)
class _Ending:
    """How a process ended: `why` for people, `reason` for metrics, and how long it had served, None if it never did."""

    why: str
    reason: str
    served_s: float | None

    @property
    def is_config(self) -> bool:
        return self.reason == _CONFIG


@dataclass(slots=True)
class _Words:
    """The last ones of a process."""

    failed: Failed | None = None


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
        self.on_ready: Callable[[], None] = lambda: None
        """Called when a process has got ready."""
        self.on_failure: Callable[[str, str], None] = lambda _name, _reason: None
        """Hears why a process ended that was not told to."""
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
            self.on_failure(self.name, ending.reason)
            if ending.is_config and self.may_refuse():
                raise ConfigError(ending.why)
            delay_s = backoff.delay_s(ending.served_s)
            if backoff.failed_starts >= self._settings.failed_starts_max and self.may_give_up():
                raise Unavailable(
                    f"{self.name}: failed to start {backoff.failed_starts} times in a row, at last: {ending.why};"
                    " --log-level debug shows more"
                )
            self._say(self.name, "failed", f"{ending.why}; starts again in {delay_s:.1f} s")
            await self._sleep(delay_s)

    def tell(self, news: ProcessFailed) -> None:
        """Tell the process that runs; nothing happens where there is none."""
        if self._child:
            self._child.tell(news)

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
        watchdog, words = Watchdog(self._settings), _Words()
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen(child, watchdog, words, started_at))
                watching = group.create_task(_watch(child, watchdog))
                status = await child.wait()
                watching.cancel()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await listening
        finally:
            served_s = loop.time() - self._ready_at if self.ready.is_set() else None
            self.ready.clear()
            child.kill()
            await child.wait()
            self._child = None
        if words.failed is not None:
            return _Ending(words.failed.message, _CONFIG if words.failed.config else "failed", served_s)
        if watchdog.verdict is not None:
            return _Ending(watchdog.verdict.why, watchdog.verdict.reason, served_s)
        return _Ending(describe_status(status), "killed" if status < 0 else "exited", served_s)

    async def _listen(
        self, child: ChildProcess, watchdog: Watchdog, words: _Words, started_at: float
    ) -> None:
        """Hear what the process says until it can say no more."""
        while (report := await child.report()) is not None:
            match report:
                case Beat():
                    watchdog.beat(report)
                case Ready(detail=detail):
                    self._ready_at = asyncio.get_running_loop().time()
                    watchdog.ready()
                    self.ready.set()
                    self._say(self.name, "ready", f"{detail}  {self._ready_at - started_at:.1f} s")
                    self.on_ready()
                case Failed():
                    words.failed = report


async def _watch(child: ChildProcess, watchdog: Watchdog) -> None:
    """Kill a process that is given up."""
    while True:
        await asyncio.sleep(watchdog.turn_s)
        if watchdog.turn() is not None:
            break
    child.kill_at_once()
