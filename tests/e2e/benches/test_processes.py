"""The process pool of simulations, when an error ends it."""

import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress

from penstock.plan.processes import Processes

_HUNG_S = 30


def interrupted(threads: ThreadPoolExecutor) -> "Future[list[Future[None]]]":
    """Leave the pool by an error while a thread waits for its jobs; give what the thread gets."""
    with suppress(ZeroDivisionError), Processes(1) as processes:
        jobs = [processes.submit(time.sleep, 60) for _ in range(5)]
        waiting = threads.submit(lambda: list(as_completed(jobs, timeout=_HUNG_S)))
        raise ZeroDivisionError
    return waiting


def test_an_error_releases_the_threads_that_wait_for_jobs():
    with ThreadPoolExecutor(1) as threads:
        waiting = interrupted(threads)
    assert {type(job.exception()) for job in waiting.result()} == {BrokenProcessPool}
