"""An asyncio loop whose clock jumps to the next timer: minutes of timeouts pass at once, alike in every run."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class DeadlockError(Exception):
    """Every task waits for another one, and no timer is set."""


class _JumpingSelector(selectors.BaseSelector):
    """Instead of waiting for a file, lets that much virtual time pass; files are only polled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._polled = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._polled.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._polled.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._polled.get_map()

    def close(self) -> None:
        self._polled.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._polled.select(0)
        if not ready:
            if timeout is None:
                raise DeadlockError(f"at {self.now_s:.6f} s: nothing can run any more")
            self.now_s += max(timeout, 0.0)
        return ready


class SimLoop(asyncio.SelectorEventLoop):
    """The loop is the clock: code that waits by asyncio runs on it unchanged. It knows no other threads."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(
        self,
        executor: Any,  # noqa: ARG002 - there is none
        func: Callable[[*Arguments], Result],
        *args: *Arguments,
    ) -> asyncio.Future[Result]:
        """Call `func` here and now: threads would bring real time in."""
        future: asyncio.Future[Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's, as from a thread
            future.set_exception(error)
        return future


def run_sim(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` in virtual time, beginning at 0."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)
