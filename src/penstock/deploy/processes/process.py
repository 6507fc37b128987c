"""Entry point of a child process: `python -m penstock.deploy.processes.process FD NAME [MODULE...]`.

FD is its socket to the supervisor; NAME is for `ps` alone. It imports the modules, waits for one `Assignment`, then sends reports. A child never outlives its supervisor: the kernel
kills it (PR_SET_PDEATHSIG), and the closed socket ends it if the kernel does not.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvloop

from penstock.core import log
from penstock.core.errors import PenstockError
from penstock.deploy.messages import (
    Assignment,
    FollowerJob,
    FrontendJob,
    Ready,
    Report,
    Tell,
    WorkerJob,
    cause_of,
    report_of,
)
from penstock.deploy.processes.control import Control

EXIT_FAILED = 1
EXIT_WRONG_CONFIG = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_log = log.get_logger()


def main() -> int:
    """Run one child process and return its exit code."""
    gc.disable()  # until everything is loaded: collections take a quarter of the time to import torch and transformers
    control = Control(socket.socket(fileno=int(sys.argv[1])))
    _import(sys.argv[3:])
    assignment = control.assignment()
    if assignment is None:
        return EXIT_FAILED
    _die_with(assignment.common.supervisor_pid)
    set_name(assignment.name)
    _allow_many_files()
    if assignment.cores:
        os.sched_setaffinity(0, assignment.cores)
    log.configure(assignment.common.log_level, process=assignment.name)

    def tell(report: Report) -> None:
        if isinstance(report, Ready):
            _freeze_garbage_collector()
            gc.enable()
        control.tell(report)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(assignment, control, tell))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error ends this process; an engine may call sys.exit
        return _fail(error, tell)
    return 0


def _import(names: Sequence[str]) -> None:
    """Import a spare process's modules; errors are ignored here and reported when the module is used."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if names:
        _freeze_garbage_collector()


def _freeze_garbage_collector() -> None:
    """Exclude the objects that exist at start from garbage collection: they live until the end.

    A full collection of the 390,000 objects of torch and transformers takes 0.2 s, in which no token comes; of a
    frontend's 84,000, 0.05 s. No collection runs before: of what imports leave, 10,000 objects are garbage, under 1 MB.
    """
    gc.freeze()


def _fail(error: BaseException, tell: Tell) -> int:
    cause, report = cause_of(error), report_of(error)
    if not isinstance(cause, PenstockError):
        _log.error("process_failed", **log.cause(cause))
    tell(report)
    return EXIT_WRONG_CONFIG if report.config else EXIT_FAILED


def _log_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what nobody waited for: a callback or task that failed, such as one of an engine's."""
    error = context.get("exception")
    _log.error("task_failed", what=context["message"], **({} if error is None else log.cause(error)))


def _die_with(supervisor_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != supervisor_pid:
        os._exit(EXIT_FAILED)  # the supervisor ended before prctl


def set_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show, also of a process that was a spare; Linux keeps 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _allow_many_files() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard limit: every client is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run(assignment: Assignment, control: Control, tell: Tell) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(_log_unhandled)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    control.listen(gone=lambda: os._exit(EXIT_FAILED))
    async with asyncio.TaskGroup() as group:
        beating = group.create_task(control.beat(assignment.common.heartbeat_interval_s))
        match assignment.job:  # each imports many modules that the other does not need
            case WorkerJob() as job:
                from penstock.deploy.processes.worker_process import run_worker  # noqa: PLC0415

                await run_worker(assignment, job, stopping, tell, control)
            case FrontendJob() as job:
                from penstock.deploy.processes.frontend_process import run_frontend  # noqa: PLC0415

                await run_frontend(assignment, job, stopping, tell, control)
            case FollowerJob() as job:
                from penstock.deploy.processes.nodes import run_follower  # noqa: PLC0415

                await run_follower(assignment, job, stopping, tell)
        beating.cancel()


if __name__ == "__main__":
    sys.exit(main())
