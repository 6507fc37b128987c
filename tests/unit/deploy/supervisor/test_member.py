"""A member over processes by script and virtual time: how it starts them, ends them, and gives them up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.types.instances import Role
from penstock.deploy.messages import (
    Assignment,
    Failed,
    Health,
    Ready,
    Report,
    WorkerJob,
)
from penstock.deploy.supervisor.child import describe_status
from penstock.deploy.supervisor.member import Backoff, ProcessMember
from penstock.graph import Supervision
from tests.support.scripted_pool import CARD, COMMON, ScriptedProcess

QUICK = Supervision(restart_delay_s=0.001, restart_delay_max_s=0.002, failed_starts_max=3)
Process = Callable[[], ScriptedProcess]


def process(*reports: Report, ends: int | None = None, ignores: bool = False, closes: bool = True) -> Process:
    """Make what starts a process with these reports, which then `ends` with a status, or lives."""

    def start() -> ScriptedProcess:
        made = ScriptedProcess(is_slow=True, ignores=ignores)
        for report in reports:
            made.say(report)
        if ends is not None:
            made.end(ends, closes=closes)
        return made

    return start


class Scene:
    """A member whose processes follow a script; the last one repeats."""

    def __init__(self, *script: Process, settings: Supervision = QUICK) -> None:
        self.said: list[tuple[str, str]] = []
        self.children: list[ScriptedProcess] = []
        self._script = list(script)
        self.member = ProcessMember("worker-1", self._assign, settings, start=self._start, say=self._say)

    def _assign(self) -> Assignment:
        job = WorkerJob(worker_id=WorkerId(1), role=Role.AGGREGATED, model_dir="", card=CARD)
        return Assignment(name="worker-1", job=job, common=COMMON)

    async def _start(self, _: Assignment) -> ScriptedProcess:
        start = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        self.children.append(start())
        return self.children[-1]

    def _say(self, name: str, state: str, detail: str) -> None:
        assert name == "worker-1"
        self.said.append((state, detail.partition("  ")[0]))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the member in the block; it is stopped and ends after it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.member.run())
            yield
            self.member.stop()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.001)


def test_backoff_doubles_to_its_bound_and_forgets_after_a_healthy_while() -> None:
    backoff = Backoff(Supervision(restart_delay_s=0.2, restart_delay_max_s=1.0, healthy_after_s=30))
    assert [backoff.delay_s(None) for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.failed_starts == 5
    assert backoff.delay_s(5.0) == 1.0
    assert backoff.failed_starts == 0
    assert [backoff.delay_s(31.0), backoff.delay_s(5.0)] == [0.2, 0.4]
    for _ in range(5000):
        backoff.delay_s(None)


def test_statuses_are_worded() -> None:
    statuses = {1: "exit code 1", -9: "killed by SIGKILL", -99: "killed by signal 99"}
    assert {status: describe_status(status) for status in statuses} == statuses


@pytest.mark.virtual
async def test_a_process_that_dies_is_replaced_until_the_member_is_stopped() -> None:
    scene = Scene(process(Ready(detail="a", kv_tiers=("host: c",)), ends=-9), process(Ready(detail="b")))
    async with scene.running():
        await scene.until(lambda: len(scene.children) == 2 and scene.member.ready.is_set())
        assert scene.member.pid == 7
        scene.member.stop()
    assert scene.said == [
        ("ready", "a"),
        ("kv tier", "host: c"),
        ("failed", "killed by SIGKILL; starts again in 0.0 s"),
        ("ready", "b"),
        ("stopped", ""),
    ]
    assert await scene.children[1].wait() == 0, "by SIGTERM"
    assert scene.member.pid is None


@pytest.mark.parametrize(
    ("child", "settings", "error", "said", "starts"),
    [
        (process(Failed(message="/m: no weights", config=True), ends=2), QUICK, ConfigError, r"^/m: no weights$", 1),
        (process(ends=1), QUICK, Unavailable, r"^worker-1: failed to start 3 times in a row, at last: exit code 1;", 3),
        (process(), Supervision(start_timeout_s=0.1, failed_starts_max=1), Unavailable, r"not ready 0\.1 s after its start", 1),
        (process(Failed(message="no memory"), ends=1, closes=False), Supervision(failed_starts_max=1), Unavailable, "no memory", 1),
    ],
    ids=["wrong setting", "never ready", "too late", "its socket does not end"],
)  # fmt: skip
@pytest.mark.virtual
async def test_a_start_that_fails_for_good_ends_it_with_the_childs_own_words(
    child: Process, settings: Supervision, error: type[Exception], said: str, starts: int
) -> None:
    scene = Scene(child, settings=settings)
    with pytest.raises(error, match=said):
        await scene.member.run()
    assert len(scene.children) == starts


@pytest.mark.parametrize("is_outside", [True, False])
@pytest.mark.virtual
async def test_what_is_not_there_yet_or_can_be_done_without_is_tried_for_ever(is_outside: bool) -> None:
    scene = Scene(process(Failed(message="no connection", outside=is_outside), ends=1))
    if not is_outside:
        scene.member.may_give_up = scene.member.may_refuse = lambda: False
    async with scene.running():
        await scene.until(lambda: len(scene.children) == 8)


@pytest.mark.virtual
async def test_it_is_said_that_an_engine_cannot_serve_and_that_it_can_again() -> None:
    scene = Scene(process(Ready(detail="a"), Health(problem="refused"), Health()))
    async with scene.running():
        await scene.until(lambda: len(scene.said) == 3)
    assert scene.said[:3] == [("ready", "a"), ("unhealthy", "refused"), ("ready", "serves again")]
    assert len(scene.children) == 1


@pytest.mark.virtual
async def test_a_process_that_is_not_ready_is_not_waited_for() -> None:
    scene = Scene(process(ignores=True))
    async with scene.running():
        await scene.until(lambda: bool(scene.children))
    assert await scene.children[0].wait() == -9
    assert scene.said == [("stopped", "")]


@pytest.mark.parametrize(
    ("reports", "status", "reason"),
    [
        ([Ready()], -9, "killed"),
        ([Ready()], 3, "exited"),
        ([Ready(), Failed(message="no memory")], 1, "failed"),
        ([Failed(message="no weights", config=True)], 2, "config"),
    ],
)
@pytest.mark.virtual
async def test_it_is_said_why_a_process_ended(reports: list[Report], status: int, reason: str) -> None:
    scene = Scene(process(*reports, ends=status), process(Ready()))
    failures: list[str] = []
    scene.member.may_refuse = lambda: False
    scene.member.on_failure = lambda _name, reason: failures.append(reason)
    async with scene.running():
        await scene.until(lambda: bool(failures))
    assert failures == [reason]
