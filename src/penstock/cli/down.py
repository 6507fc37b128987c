"""`penstock down`: ends a deployment of this host, and removes what one that was killed has left."""

import argparse
import asyncio
import math
import signal
import sys
from pathlib import Path

from penstock.cli.parser import Parser, add_deployment
from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.control.hosted import Hosted, SupervisorProcess, choose, hosted


def add_down(parser: Parser) -> None:
    """Add the arguments of `penstock down`."""
    parser.description = (
        "End a deployment on this host as Ctrl-C does: requests in flight finish first. Where it was killed, end and"
        " remove what it left. Without arguments the only one is ended, or the one that was started in this directory."
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="the graph's file that it was started from")
    add_deployment(parser)
    parser.add_argument("--now", action="store_true", help="end requests in flight too")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds until it is killed (default: what its graph allows for draining, and 10)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    if options.timeout is not None and not (options.timeout >= 0 and math.isfinite(options.timeout)):
        raise ConfigError(f"--timeout: must be a number of seconds >= 0, got {options.timeout}")
    file = None if options.file is None else Path(options.file)
    take_down(file, name=options.name, part=options.part, now=options.now, timeout_s=options.timeout)
    return 0


_FLAGS = "its graph file, --name or --part"
_POLL_S = 0.05
_GRACE_S = 10.0
"""Beyond the time that draining may take."""
_NOW_S = 15.0
_REPEAT_S = 1.0
_KILLED_S = 10.0


def take_down(
    file: Path | None, *, name: str | None, part: str | None, now: bool, timeout_s: float | None
) -> None:
    """End a deployment and wait until it is gone.

    Args:
        file: the graph's file that it was started from.
        name: its name; None, with no file: the only one of this host, or the one started in this directory.
        part: which part of the deployment, where several run here.
        now: end requests in flight instead of finishing them.
        timeout_s: seconds until it is killed; None is as long as its graph says that draining may take.

    Raises:
        Unavailable: there is none, or it belongs to another container.
        ConfigError: several fit, or it is a program of somebody's own.
    """
    found = hosted()
    living, killed = [each for each in found if each.is_live], [each for each in found if not each.is_live]
    left = [each for each in killed if _is_meant(each, file, name, part)]
    for each in left:
        ended = each.clean()
        if ended is None:
            continue
        groups = "1 process group" if ended == 1 else f"{ended} process groups"
        said = f"ended {groups} that it had left, and " if ended else ""
        _say(each, "removed", f"was killed before: {said}removed {each.directory}")
    if left and not any(_is_meant(each, file, name, part) for each in living):
        return
    asyncio.run(
        _end(choose(living, file=file, name=name, part=part, flags=_FLAGS), now=now, timeout_s=timeout_s)
    )


def _is_meant(each: Hosted, file: Path | None, name: str | None, part: str | None) -> bool:
    try:
        choose([each], file=file, name=name, part=part)
    except Unavailable:
        return False
    return True


async def _end(each: Hosted, *, now: bool, timeout_s: float | None) -> None:
    with SupervisorProcess.of(each) as supervisor:
        record = each.record
        assert record is not None, "it was opened by it"
        if timeout_s is None:
            timeout_s = _NOW_S if now else record.stop_s_max + _GRACE_S
        supervisor.signal(signal.SIGTERM)
        if now:
            supervisor.signal(signal.SIGTERM)
            _say(each, "stopping", "ends requests in flight")
        else:
            _say(each, "stopping", f"finishes requests in flight, within {timeout_s:.0f} s")
        if not await _wait(each, timeout_s, again=supervisor if now else None):
            _say(each, "killed", f"as it did not end within {timeout_s:.0f} s")
            supervisor.signal(signal.SIGKILL)
            if not await _wait(each, _KILLED_S):
                raise Unavailable(
                    f"{each.name}: process {record.pid} does not end, even by SIGKILL; it hangs in the kernel: look at its"
                    " devices and disks"
                )
        if each.directory.exists():
            each.clean()
    _say(each, "stopped", "on this host" if record.origin is not None and _is_part(each) else "")


def _is_part(each: Hosted) -> bool:
    """Tell whether other hosts may run parts of it."""
    origin = None if each.record is None else each.record.origin
    return origin is not None and (origin.part is not None or "runtime.join" in origin.overrides)


async def _wait(each: Hosted, timeout_s: float, *, again: SupervisorProcess | None = None) -> bool:
    """Wait until its lock is released; with `again` the signal is repeated, as one that comes before the last was handled is lost."""
    loop = asyncio.get_running_loop()
    give_up_s, repeat_s = loop.time() + timeout_s, loop.time() + _REPEAT_S
    while each.still_runs():
        if loop.time() >= give_up_s:
            return False
        if again is not None and loop.time() >= repeat_s:
            again.signal(signal.SIGTERM)
            again = None
        await asyncio.sleep(_POLL_S)
    return True


def _say(each: Hosted, state: str, detail: str) -> None:
    sys.stdout.write(f"{each.name:<11} {state:<9} {detail}".rstrip() + "\n")
    sys.stdout.flush()
