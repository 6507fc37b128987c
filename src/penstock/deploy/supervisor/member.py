"""One member of a deployment, such as `worker-1`: a process that is restarted when it ends."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import ReplicaState
from penstock.deploy.messages import (
    Assignment,
    Closing,
    Drain,
    Failed,
    Health,
    Observed,
    ProcessHeartbeat,
    ProcessOrder,
    Ready,
    Report,
    StartPhase,
    WorkerRoleChanged,
)
from penstock.deploy.supervisor.child import describe_status
from penstock.graph import Supervision
from penstock.runtime.observations import Window


class Backoff:
    """Doubles the delay with each consecutive failure; `healthy_after_s` of service resets it."""

    def __init__(self, settings: Supervision) -> None:
        self._settings = settings
        self._failures = 0
        self.failed_starts = 0
        """Consecutive starts in which the process never became ready."""

    def delay_s(self, served_s: float | None) -> float:
        """Count a failure and return the seconds to wait.

        Args:
            served_s: seconds the process was ready; None if never.
        """
        if served_s is None:
            self.failed_starts += 1
        else:
            self.failed_starts = 0
            if served_s >= self._settings.healthy_after_s:
                self._failures = 0
        delay_s = self._settings.restart_delay_s * 2.0 ** min(self._failures, 30)
        self._failures += 1
        return min(delay_s, self._settings.restart_delay_max_s)


CLOSE_TIMEOUT = "close_timeout"
_TURN_S = 1.0
_TICKS_MIN = 4  # ticks in the shortest timeout, for its precision


@dataclass(frozen=True, slots=True)
class Verdict:
    """Reasons to kill a process: `reason` for metrics, `why` for the log."""

    reason: str
    why: str


class Watchdog:
    """Watches one process. Its owner calls `tick` every `tick_s` seconds."""

    def __init__(self, settings: Supervision) -> None:
        """Start watching a process that is starting."""
        self.tick_s = tick_s(settings)
        """Seconds between ticks."""
        self.verdict: Verdict | None = None
        """Result of the last tick; None while the process may live."""
        self._settings = settings
        self._is_ready = False
        self._quiet = 0  # ticks since its start, ready report or last heartbeat
        self._still = 0  # ticks in which its engine had requests and finished no step
        self._closing: int | None = None  # ticks since its engine began to close
        self._beat = ProcessHeartbeat()

    def ready(self) -> None:
        """Note that the process is ready: heartbeats are required from now on."""
        self._is_ready = True
        self._quiet = self._still = 0

    def beat(self, beat: ProcessHeartbeat) -> None:
        """Note a heartbeat and the engine's progress."""
        self._quiet = 0
        if beat.steps != self._beat.steps or not beat.has_requests:
            self._still = 0
        self._beat = beat

    def closing(self) -> None:
        """Note that the engine begins to close."""
        self._closing = 0

    def tick(self) -> Verdict | None:
        """Count a tick; returns a verdict if the process must be killed."""
        self._quiet += 1
        self._still += self._beat.has_requests
        if self._closing is not None:
            self._closing += 1
        self.verdict = self._judge()
        return self.verdict

    def _judge(self) -> Verdict | None:
        settings = self._settings
        if self._closing is not None:
            return self._judge_closing(self._closing * self.tick_s)
        if not self._is_ready:
            if self._quiet * self.tick_s < settings.start_timeout_s:
                return None
            return Verdict("start_timeout", f"not ready {settings.start_timeout_s:g} s after its start")
        if self._quiet * self.tick_s >= settings.liveness_timeout_s:
            return Verdict(
                "silent",
                f"killed after {settings.liveness_timeout_s:g} s of silence (supervision.liveness_timeout_s)",
            )
        if self._still * self.tick_s >= settings.step_timeout_s:
            return Verdict(
                "stuck",
                f"killed as its engine had requests and finished no step for {settings.step_timeout_s:g} s"
                " (supervision.step_timeout_s)",
            )
        return None

    def _judge_closing(self, taken_s: float) -> Verdict | None:
        limit_s = self._settings.close_timeout_s
        if taken_s < limit_s:
            return None
        return Verdict(
            CLOSE_TIMEOUT,
            f"killed as its engine did not close within {limit_s:g} s (supervision.close_timeout_s)",
        )


def tick_s(settings: Supervision) -> float:
    """Give the seconds between ticks, and between heartbeats."""
    allowances = (
        settings.start_timeout_s,
        settings.liveness_timeout_s,
        settings.step_timeout_s,
        settings.close_timeout_s,
    )
    return min(_TURN_S, min(allowances) / _TICKS_MIN)


_LAST_WORDS_S = (
    1.0  # a dead child's reports are already in the socket; a process it forked may hold the socket open
)


class ChildProcess(Protocol):
    """Interface of `Child` that a member uses."""

    @property
    def pid(self) -> int: ...
    async def report(self) -> Report | None: ...
    async def wait(self) -> int: ...
    def tell(self, news: ProcessOrder) -> None: ...
    def signal(self, number: signal.Signals) -> None: ...
    def kill(self) -> None: ...
    def kill_at_once(self) -> None: ...


_CONFIG = "config"
_DRAINS = "finishes its requests"


@dataclass(slots=True, frozen=True)
class _Ending:
    """How a process ended: `why` is printed, `reason` goes to metrics, `served_s` is None if it never got ready.

    `is_outside`: it waits for what is not of this deployment.
    """

    why: str
    reason: str
    served_s: float | None
    is_outside: bool = False

    @property
    def is_config(self) -> bool:
        return self.reason == _CONFIG


@dataclass(slots=True)
class _LastReport:
    """A process's last report."""

    failed: Failed | None = None


class ProcessMember:
    """Keeps one process running until `stop`. One task runs it; other methods may be called on the same event loop."""

    def __init__(
        self,
        name: str,
        assign: Callable[[], Assignment],
        settings: Supervision,
        *,
        start: Callable[[Assignment], Awaitable[ChildProcess]],
        say: Callable[[str, str, str], None],
    ) -> None:
        """Create a member; `run` starts its process.

        Args:
            name: its name in output, such as `worker-1`.
            assign: makes the next process's assignment.
            settings: timeouts and restart delays.
            start: starts a process.
            say: called with (name, state, detail) at every change of state.
        """
        self.name = name
        self.ready = asyncio.Event()
        self.waits_outside = False
        """Whether its last process ended for want of something outside of the deployment, such as a running server."""
        self.has_wrong_server = False
        """Whether a server outside this deployment answers, and is not the one that the process needs."""
        self.may_give_up: Callable[[], bool] = lambda: True
        """Called after too many failed starts; False (keep trying) while the deployment serves without this member."""
        self.may_refuse: Callable[[], bool] = lambda: True
        """Called after a config error; False (keep trying) while the deployment can do without this member."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when a process is ready."""
        self.on_failure: Callable[[str, str], None] = lambda _name, _reason: None
        """Called with (name, reason) when a process ends unasked."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `phase`, `since` or `is_stopping` changes."""
        self.on_role: Callable[[WorkerRoleChanged], None] = lambda _changed: None
        """Called when its worker has changed its role, or refuses to."""
        self.on_window: Callable[[Window], None] = lambda _window: None
        """Called with each window that its process sends."""
        self.problem = ""
        """Why a process that is ready cannot serve for now; empty while it can."""
        self.phase = "starts a process"
        """What a process that is not ready does, or why the last one ended."""
        self.since: float | None = None
        """Loop time at which the running process became ready or, before that, was started; None before the first start."""
        self.start_s: float | None = None
        """Seconds that its last start took."""
        self.needs_prefill = False
        """Whether its worker, as a decode worker, computes no prompts itself."""
        self.has_failed = False
        """Whether its last process ended unasked and no later one is ready."""
        self.failed_starts = 0
        """Consecutive starts in which the process never became ready."""
        self.has_wrong_config = False
        """Whether its last process ended as another one would, by a wrong setting."""
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

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def state(self) -> ReplicaState:
        if self.is_stopping:
            return ReplicaState.DRAINING
        if self.ready.is_set():
            return ReplicaState.READY
        return ReplicaState.FAILED if self.has_failed else ReplicaState.STARTING

    def age_s(self, now_s: float) -> float:
        """Give the seconds since `since`, at loop time `now_s`."""
        return 0.0 if self.since is None else max(0.0, now_s - self.since)

    async def run(self) -> None:
        """Run until `stop`, restarting the process whenever it ends.

        Raises:
            ConfigError: the process reported a config error, and `may_refuse`.
            Unavailable: `failed_starts_max` consecutive starts failed.
        """
        backoff = Backoff(self._settings)
        while not self._stopping.is_set():
            ending = await self._run_process()
            if self._stopping.is_set():
                self._say(self.name, "stopped", ending.why if ending.reason == CLOSE_TIMEOUT else "")
                return
            self.has_failed, self.has_wrong_config = True, ending.is_config
            self.failed_starts = self.failed_starts + 1 if ending.served_s is None else 0
            self.waits_outside = ending.is_outside
            self.has_wrong_server = ending.is_outside and ending.is_config
            self._note(ending.why)
            self.on_failure(self.name, ending.reason)
            if ending.is_config and self.may_refuse():
                raise ConfigError(ending.why)
            delay_s = backoff.delay_s(ending.served_s)
            has_failed_often = backoff.failed_starts >= self._settings.failed_starts_max
            if has_failed_often and not ending.is_outside and self.may_give_up():
                raise Unavailable(
                    f"{self.name}: failed to start {backoff.failed_starts} times in a row, at last: {ending.why};"
                    " --log-level debug shows more"
                )
            self._say(self.name, "failed", f"{ending.why}; starts again in {delay_s:.1f} s")
            await self._sleep(delay_s)

    def tell(self, news: ProcessOrder) -> None:
        """Send a message to the running process, if any."""
        if self._child:
            self._child.tell(news)

    def stop(self, drain_s: float | None = None) -> None:
        """Drain and end the process for good. A worker's requests may take `drain_s`; None for the drain timeout that it was started with."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._note(_DRAINS if self.ready.is_set() else "stops")
            if self._child and self.ready.is_set():
                if drain_s is not None:
                    self._child.tell(Drain(timeout_s=drain_s))
                self._child.signal(signal.SIGTERM)
            elif self._child:  # not ready: nothing to drain, and it may be busy loading a model
                self._child.kill()

    def kill(self) -> None:
        """End the process at once; it is not restarted."""
        self._stopping.set()
        if self._child:
            self._child.kill()

    def crash(self) -> None:
        """End the process at once, as a crash would: it is started again."""
        if self._child:
            self._child.kill()

    def _note(self, phase: str) -> None:
        self.phase = phase
        self.since = asyncio.get_running_loop().time()
        self.on_change()

    async def _sleep(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _run_process(self) -> _Ending:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        if not self.has_failed:
            self._note("starts a process")
        self.problem = ""
        child = await self._start(self._assign())
        self._child = child
        if self._stopping.is_set():  # stopped while the process was starting
            child.kill()
        watchdog, last_report = Watchdog(self._settings), _LastReport()
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen(child, watchdog, last_report, started_at))
                watching = group.create_task(_watch(child, watchdog))
                status = await child.wait()
                watching.cancel()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await listening
        finally:
            served_s = loop.time() - self._ready_at if self.ready.is_set() else None
            self.ready.clear()
            self.on_change()
            child.kill()
            await child.wait()
            self._child = None
        failed = last_report.failed
        if failed is not None:
            reason = _CONFIG if failed.config else "failed"
            return _Ending(failed.message, reason, served_s, is_outside=failed.outside)
        if watchdog.verdict is not None:
            return _Ending(watchdog.verdict.why, watchdog.verdict.reason, served_s)
        return _Ending(describe_status(status), "killed" if status < 0 else "exited", served_s)

    async def _listen(
        self, child: ChildProcess, watchdog: Watchdog, last_report: _LastReport, started_at: float
    ) -> None:
        """Handle the process's reports until the end of its socket."""
        while (report := await child.report()) is not None:
            match report:
                case ProcessHeartbeat():
                    watchdog.beat(report)
                case Ready(detail=detail, needs_prefill=needs_prefill, kv_tiers=kv_tiers):
                    self.needs_prefill = needs_prefill
                    self._ready_at = asyncio.get_running_loop().time()
                    watchdog.ready()
                    self.ready.set()
                    self.start_s, self.has_failed = self._ready_at - started_at, False
                    self.waits_outside = self.has_wrong_server = self.has_wrong_config = False
                    self.failed_starts = 0
                    self._note("")
                    self._say(self.name, "ready", f"{detail}  {self._ready_at - started_at:.1f} s")
                    for line in kv_tiers:
                        self._say(self.name, "kv tier", line)
                    self.on_ready()
                case Health(problem=problem):
                    self.problem = problem
                    self._say(self.name, "unhealthy" if problem else "ready", problem or "serves again")
                case StartPhase(what=what):
                    if not self.has_failed:
                        self.phase = what
                        self.on_change()
                case Observed(window=window):
                    self.on_window(window)
                case WorkerRoleChanged():
                    self.on_role(report)
                case Closing():
                    watchdog.closing()
                case Failed():  # a later one is of its closing
                    last_report.failed = last_report.failed or report


async def _watch(child: ChildProcess, watchdog: Watchdog) -> None:
    """Kill the process when the watchdog says so."""
    while True:
        await asyncio.sleep(watchdog.tick_s)
        if watchdog.tick() is not None:
            break
    child.kill_at_once()
