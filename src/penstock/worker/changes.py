"""Changes that an operator asks of a worker: another role, sleep, waking up. One at a time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, assert_never

from penstock.core.errors import EngineError, PenstockError, RequestError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import BecomeRole, InstanceState, Role, Sleep, WakeUp, WorkerChange
from penstock.seams import Answer, Engine, Sleeping
from penstock.worker.engine_driver import EngineDriver
from penstock.worker.registration import WorkerRegistration

_LEVELS = (1, 2)
_log = get_logger()


class WorkerChanges:
    """Makes changes while the worker serves. One event loop owns it."""

    def __init__(
        self, engine: Engine, engine_name: str, driver: EngineDriver, registration: WorkerRegistration
    ) -> None:
        self._engine = engine
        self._engine_name = engine_name
        self._driver = driver
        self._registration = registration
        self.on_role: Callable[[Role], None] = lambda _role: None
        """Called when the worker takes requests in another role."""
        self._under_way = ""
        self._task: asyncio.Task[None] | None = None

    def begin(self, change: WorkerChange, group: asyncio.TaskGroup, answer: Answer) -> None:
        """Check a change and start it in the group; `answer` gets the outcome."""
        try:
            under_way, work = self._checked(change)
        except PenstockError as error:
            answer(error)
            return
        self._under_way = under_way
        self._task = group.create_task(self._make(work, answer))

    def cancel(self) -> None:
        """End the change that is under way: the worker stops."""
        if self._task is not None:
            self._task.cancel()

    async def _make(self, work: Coroutine[Any, Any, None], answer: Answer) -> None:
        try:
            await work
        except PenstockError as error:
            answer(error)
        except asyncio.CancelledError:
            answer(Unavailable(f"{self._name} stops; choose another worker"))
            raise
        else:
            answer(None)
        finally:
            self._under_way = ""

    def _checked(self, change: WorkerChange) -> tuple[str, Coroutine[Any, Any, None]]:
        """Check that a change may be made now; give what the worker is doing then, and the work.

        Raises:
            RequestError: another change is under way, the worker drains, it is so already, or its engine cannot (409).
        """
        state, refusal = self._registration.instance.state, self._registration.refusal
        if self._under_way:
            raise _conflict(f"{self._name} is {self._under_way} already; wait until it has")
        if state is InstanceState.DRAINING or (refusal is not None and state is InstanceState.READY):
            why = "it is draining" if refusal is None else refusal.message
            raise _conflict(f"{self._name} does not change any more: {why}; choose another worker")
        is_asleep = state is InstanceState.ASLEEP
        match change:
            case BecomeRole(role=role):
                if is_asleep:
                    raise _conflict(f"{self._name} is asleep; wake it before you change its role")
                if role is self._registration.instance.role:
                    raise _conflict(f"{self._name} is {role} already; choose another role")
                return f"becoming {role}", self._become(role)
            case Sleep(level=level):
                engine = self._sleeping(level)
                if is_asleep:
                    raise _conflict(
                        f"{self._name} is asleep already; wake it first to sleep at another level"
                    )
                return "falling asleep", self._sleep(engine, level)
            case WakeUp():
                if not is_asleep or not isinstance(self._engine, Sleeping):
                    raise _conflict(f"{self._name} is awake already")
                return "waking up", self._wake_up(self._engine)
            case _:
                assert_never(change)

    def _sleeping(self, level: int) -> Sleeping:
        """Give the engine, if it can sleep at this level.

        Raises:
            RequestError: it cannot, or there is no such level.
        """
        if level not in _LEVELS:
            raise RequestError(f"level: must be 1 or 2, got {level}", param="level")
        if not isinstance(self._engine, Sleeping):
            raise _conflict(
                f"{self._name}: engine {self._engine_name} cannot sleep; stop the worker to free its memory"
            )
        self._engine.check_sleep(level)
        return self._engine

    async def _become(self, role: Role) -> None:
        """Drain requests and register again in another role. The model stays loaded, and exported KV stays readable."""
        registration = self._registration
        before = registration.instance.role
        await self._driver.prepare(role)
        await registration.set_aside(f"becomes {role}", until_read=False)
        await registration.resume(
            role=role,
            engine=self._driver.assume(role, registration.instance.engine),
            exchange=self._driver.exchange,
        )
        _log.info("role_changed", worker=self._name, role=role, before=before)
        self.on_role(role)

    async def _sleep(self, engine: Sleeping, level: int) -> None:
        """Drain requests and exported KV, and register as asleep once the engine is."""
        registration = self._registration
        await registration.set_aside("falls asleep", until_read=True)
        try:
            await engine.sleep(level)
        except Exception as error:
            await registration.resume()
            raise self._failed("sleep", error) from error
        await registration.rest()
        _log.info("worker_asleep", worker=self._name, level=level)

    async def _wake_up(self, engine: Sleeping) -> None:
        try:
            await engine.wake_up()
        except Exception as error:
            raise self._failed("wake up", error) from error
        await self._registration.resume()
        _log.info("worker_awake", worker=self._name)

    def _failed(self, what: str, error: Exception) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        _log.exception("sleep_failed", worker=self._name, exc_info=error)
        text = " ".join(str(error).split()) or type(error).__name__
        return EngineError(f"{self._name}: engine {self._engine_name} could not {what}: {text}")

    @property
    def _name(self) -> str:
        return f"worker {self._registration.instance.name}"


def _conflict(message: str) -> RequestError:
    return RequestError(message, http_status=409)
