"""What several tests of native code need."""

import sys
import threading
import time
from collections.abc import Callable

import pytest


@pytest.fixture
def others_run_beside() -> Callable[[Callable[[], object]], bool]:
    """Give a function that tells whether other threads run while a long call does.

    With the GIL held, the main thread would see nothing of the call but its end.
    """

    def run(call: Callable[[], object]) -> bool:
        started, ended = threading.Event(), threading.Event()

        def work() -> None:
            started.set()
            call()
            ended.set()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(60.0)  # no thread is made to give way: it has to do so itself
        try:
            thread = threading.Thread(target=work)
            thread.start()
            started.wait()
            time.sleep(0.002)
            seen_running = not ended.is_set()
            thread.join()
        finally:
            sys.setswitchinterval(interval)
        return seen_running

    return run
