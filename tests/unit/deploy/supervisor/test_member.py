import asyncio
import signal
import sys

import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.types.cards import ModelCard
from penstock.core.types.instances import Role
from penstock.deploy.messages import (
    Assignment,
    Beat,
    Closing,
    Common,
    Failed,
    Health,
    ProcessFailed,
    Ready,
    Report,
    WorkerJob,
)
from penstock.deploy.supervisor.backoff import Backoff
from penstock.deploy.supervisor.child import describe_status
from penstock.deploy.supervisor.member import Member
from penstock.graph import Supervision
from tests.support.coroutines import real, virtual

QUICK = Supervision(restart_delay_s=0.001, restart_delay_max_s=0.002, failed_starts_max=3)

CARD = ModelCard(name="m", context_length=64, block_size=16, salt=b"")
COMMON = Common(
    graph_json="",
    runtime_dir="",
    hub_address="",
    secret=b"",
    hash_key=b"",
    log_level="info",
    supervisor_pid=1,
    heartbeat_interval_s=1.0,
)


class ScriptedChild:
    """Says its reports, then ends with `status`; without one it lives until a signal comes."""

    def __init__(self, reports: list[Report], status: int | None) -> None:
        self.pid = 7
        self.told: list[ProcessFailed] = []
        self.signals: list[signal.Signals] = []
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()
        for report in reports:
            self._reports.put_nowait(report)
        self._ended = asyncio.Event()
        self._status = 0
        if status is not None:
            self._end(status)

    def _end(self, status: int) -> None:
        if not self._ended.is_set():
            self._status = status
            self._reports.put_nowait(None)
            self._ended.set()

    async def report(self) -> Report | None:
        return await self._reports.get()

    async def wait(self) -> int:
        await self._ended.wait()
        return self._status

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        self._end(0 if number == signal.SIGTERM else -number)

    def kill(self) -> None:
        self._end(-9)

    def kill_at_once(self) -> None:
        self._end(-9)

    def say(self, report: Report) -> None:
        self._reports.put_nowait(report)

    def tell(self, failure: ProcessFailed) -> None:
        self.told.append(failure)


class Scene:
    """A member whose processes follow a script; the last one repeats."""

    def __init__(self, *script: tuple[list[Report], int | None], settings: Supervision = QUICK) -> None:
        self.said: list[tuple[str, str]] = []
        self.children: list[ScriptedChild] = []
        self._script = list(script)
        self.member = Member("worker-1", self._assign, settings, start=self._start, say=self._say)

    def _assign(self) -> Assignment:
        return Assignment(
            name="worker-1",
            job=WorkerJob(
                worker_id=WorkerId(len(self.children) + 1), role=Role.AGGREGATED, model_dir="", card=CARD
            ),
            common=COMMON,
        )

    async def _start(self, _: Assignment) -> ScriptedChild:
        reports, status = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        self.children.append(ScriptedChild(reports, status))
        return self.children[-1]

    def _say(self, name: str, state: str, detail: str) -> None:
        assert name == "worker-1"
        self.said.append((state, detail.partition("  ")[0]))


def test_backoff_doubles_to_its_bound_and_forgets_after_a_healthy_while() -> None:
    settings = Supervision(restart_delay_s=0.2, restart_delay_max_s=1.0, healthy_after_s=30)
    backoff = Backoff(settings)
    assert [backoff.delay_s(None) for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.failed_starts == 5
    assert backoff.delay_s(5.0) == 1.0
    assert backoff.failed_starts == 0
    assert [backoff.delay_s(31.0), backoff.delay_s(5.0)] == [0.2, 0.4]
    for _ in range(5000):
        backoff.delay_s(None)


def test_statuses_are_worded() -> None:
    assert describe_status(1) == "exit code 1"
    assert describe_status(-9) == "killed by SIGKILL"
    assert describe_status(-99) == "killed by signal 99"


@real
async def test_a_process_that_dies_is_replaced_until_the_member_is_stopped() -> None:
    scene = Scene(([Ready(detail="a", kv_tiers=("host: c",))], -9), ([Ready(detail="b")], None))
    async with asyncio.TaskGroup() as group, asyncio.timeout(5):
        running = group.create_task(scene.member.run())
        while len(scene.children) < 2 or not scene.member.ready.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert scene.member.pid == 7
        scene.member.stop()
        scene.member.stop()
        await running
    assert scene.said == [
        ("ready", "a"),
        ("kv tier", "host: c"),
        ("failed", "killed by SIGKILL; starts again in 0.0 s"),
        ("ready", "b"),
        ("stopped", ""),
    ]
    assert scene.children[1].signals == [signal.SIGTERM]
    assert scene.member.pid is None


def test_settings_that_cannot_work_end_it_with_the_childs_own_words() -> None:
    scene = Scene(([Failed(message="/m: no weights", config=True)], 2))
    with pytest.raises(ConfigError, match=r"^/m: no weights$"):
        asyncio.run(scene.member.run())
    assert len(scene.children) == 1


def test_a_process_that_never_gets_ready_is_given_up() -> None:
    scene = Scene(([], 1))
    with pytest.raises(
        Unavailable, match=r"^worker-1: failed to start 3 times in a row, at last: exit code 1;"
    ):
        asyncio.run(scene.member.run())
    assert len(scene.children) == 3


@real
async def test_a_member_the_deployment_can_do_without_is_tried_for_ever() -> None:
    scene = Scene(([Failed(message="no weights", config=True)], 2), ([], 1))
    scene.member.may_give_up = scene.member.may_refuse = lambda: False
    async with asyncio.TaskGroup() as group, asyncio.timeout(5):
        running = group.create_task(scene.member.run())
        while len(scene.children) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        scene.member.stop()
        await running


@real
async def test_a_worker_whose_server_is_not_there_yet_is_tried_for_ever() -> None:
    scene = Scene(([Failed(message="no connection", outside=True)], 1))
    async with asyncio.TaskGroup() as group, asyncio.timeout(5):
        running = group.create_task(scene.member.run())
        while len(scene.children) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        scene.member.stop()
        await running


@real
async def test_it_is_said_that_an_engine_cannot_serve_and_that_it_can_again() -> None:
    scene = Scene(([Ready(detail="a"), Health(problem="refused"), Health()], None))
    async with asyncio.TaskGroup() as group, asyncio.timeout(5):
        running = group.create_task(scene.member.run())
        while len(scene.said) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(scene.children) == 1
        scene.member.stop()
        await running
    assert scene.said[:3] == [("ready", "a"), ("unhealthy", "refused"), ("ready", "serves again")]


def test_a_start_that_takes_too_long_is_a_failed_one() -> None:
    settings = Supervision(start_timeout_s=0.001, failed_starts_max=1)
    scene = Scene(([], None), settings=settings)
    with pytest.raises(Unavailable, match=r"not ready 0\.001 s after its start"):
        asyncio.run(scene.member.run())


@real
async def test_a_process_that_is_not_ready_is_not_waited_for() -> None:
    scene = Scene(([], None))
    async with asyncio.TaskGroup() as group, asyncio.timeout(5):
        running = group.create_task(scene.member.run())
        while not scene.children:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        scene.member.stop()
        await running
    assert await scene.children[0].wait() == -9
    assert scene.said == [("stopped", "")]


@real
async def test_kill_ends_at_once_and_cancellation_leaves_no_process() -> None:
    scene = Scene(([Ready()], None))
    async with asyncio.TaskGroup() as group, asyncio.timeout(5):
        running = group.create_task(scene.member.run())
        await scene.member.ready.wait()
        scene.member.kill()
        await running
        other = Scene(([Ready()], None))
        running = group.create_task(other.member.run())
        await other.member.ready.wait()
        running.cancel()
    assert await other.children[0].wait() == -9


class HangingChild(ScriptedChild):
    """Ends by SIGKILL alone."""

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        self.say(Closing())


@pytest.mark.parametrize("cause", [None, "the engine ended: KeyError('x')"])
@virtual
async def test_an_engine_that_does_not_close_is_killed(
    monkeypatch: pytest.MonkeyPatch, cause: str | None
) -> None:
    """When it stops, and when it has failed: then it is started again for its own reason."""
    monkeypatch.setattr(sys.modules[__name__], "ScriptedChild", HangingChild)
    settings = Supervision(close_timeout_s=3)
    scene = Scene(([Ready(detail="a")], None), settings=settings)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.member.run())
        await scene.member.ready.wait()
        if cause is None:
            scene.member.stop()
        else:
            scene.children[0].say(Failed(message=cause))
            scene.children[0].say(Closing())
        await asyncio.sleep(2.5)
        assert len(scene.said) == 1
        await asyncio.sleep(1)
        assert await scene.children[0].wait() == -9
        if cause is None:
            await running
        else:
            scene.member.kill()
    why = "killed as its engine did not close within 3 s (supervision.close_timeout_s)"
    assert scene.said[1] == (
        ("stopped", why) if cause is None else ("failed", f"{cause}; starts again in 0.2 s")
    )


@virtual
async def test_a_process_that_falls_silent_is_killed_and_started_again() -> None:
    """One that says that it is there lives on; a supervisor that was stopped blames nobody for the time that it missed."""
    settings = Supervision(liveness_timeout_s=10, restart_delay_s=0.5)
    scene = Scene(([Ready(detail="a")], None), ([Ready(detail="b")], None), settings=settings)
    failures: list[tuple[str, str]] = []
    scene.member.on_failure = lambda name, reason: failures.append((name, reason))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.member.run())
        await scene.member.ready.wait()
        for _ in range(40):
            await asyncio.sleep(1)
            scene.children[0].say(Beat())
        assert len(scene.children) == 1
        await asyncio.sleep(11)
        assert len(scene.children) == 2
        assert await scene.children[0].wait() == -9
        assert failures == [("worker-1", "silent")]
        scene.member.tell(ProcessFailed(name="worker-1", reason="silent", count=1))
        assert [failure.count for failure in scene.children[1].told] == [1]
        scene.member.stop()
        await running
    assert scene.said[1] == (
        "failed",
        "killed after 10 s of silence (supervision.liveness_timeout_s); starts again in 0.5 s",
    )


@virtual
async def test_last_words_count_though_something_it_started_keeps_the_socket_open() -> None:
    class Holding(ScriptedChild):
        def _end(self, status: int) -> None:
            if not self._ended.is_set():
                self._status = status
                self._ended.set()  # and its socket does not end

    scene = Scene(([], None), settings=Supervision(failed_starts_max=1))
    child = Holding([Failed(message="no memory")], 1)

    async def start(_: Assignment) -> Holding:
        return child

    scene.member._start = start
    with pytest.raises(Unavailable, match="no memory"):
        await scene.member.run()


@pytest.mark.parametrize(
    ("reports", "status", "reason"),
    [
        ([Ready()], -9, "killed"),
        ([Ready()], 3, "exited"),
        ([Ready(), Failed(message="no memory")], 1, "failed"),
        ([Failed(message="no weights", config=True)], 2, "config"),
    ],
)
@virtual
async def test_it_is_said_why_a_process_ended(reports: list[Report], status: int, reason: str) -> None:
    scene = Scene((reports, status), ([Ready()], None))
    heard = asyncio.Event()
    failures: list[str] = []
    scene.member.may_refuse = lambda: False
    scene.member.on_failure = lambda _name, reason: (failures.append(reason), heard.set())[0]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(scene.member.run())
        await heard.wait()
        scene.member.stop()
        await running
    assert failures == [reason]
