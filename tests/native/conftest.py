"""What several tests of native code need."""

import sys
import threading
from collections.abc import Callable

import pytest


@pytest.fixture
def others_run_beside() -> Callable[[Callable[[], object]], bool]:
    """Give a function that tells whether other threads run while a long call does, in one of many tries.

    With the GIL held, the main thread would see nothing of any call but its end.
    """

    def is_seen(call: Callable[[], object]) -> bool:
        started, ended = threading.Event(), threading.Event()

        def work() -> None:
            started.set()
            call()
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        is_running = not ended.is_set()
        thread.join()
        return is_running

    def run(call: Callable[[], object]) -> bool:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60.0)  # no thread is made to give way: it has to do so itself
        try:
            return any(is_seen(call) for _ in range(50))
        finally:
            sys.setswitchinterval(interval)

    return run
