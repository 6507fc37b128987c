"""`penstock scale`: shows and changes how many workers each role of a running deployment has."""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec

from penstock.cli.admin import ask
from penstock.cli.parser import Parser, add_deployment, add_frontend, frontend_of
from penstock.core.config import nearest
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import Replica, ReplicaState, Role, Scale
from penstock.deploy.control.local_connector import FrontendAddress, find_deployment
from penstock.planner.observation import Observation
from penstock.router.dispatch.operators import StateChanged, WorkerRoleChanged
from penstock.seams import ScalingConnector


def add_scale(parser: Parser) -> None:
    """Add the arguments of `penstock scale`."""
    parser.description = (
        "Show the workers of a deployment that runs on this machine, or change how many a role has. Added workers"
        " start while the others serve; retired ones finish or migrate their requests first. See docs/planner.md."
    )
    parser.add_argument("role", nargs="?", metavar="ROLE", help="prefill, decode or aggregated; without, all")
    parser.add_argument("count", nargs="?", metavar="N", help="its workers from now on; without, shows them")
    add_deployment(parser, has_url=True)
    parser.add_argument(
        "--no-wait", action="store_true", help="do not wait until workers are ready or have ended"
    )
    parser.set_defaults(run=_run_scale)


def add_role(parser: Parser) -> None:
    """Add the arguments of `penstock role`."""
    parser.description = (
        "Change a running worker's role to prefill, decode or aggregated without loading the model again: it drains"
        " within worker.drain_timeout_s and registers anew. See docs/disaggregation.md."
    )
    parser.add_argument("worker", metavar="WORKER", help="its name in GET /admin/workers, such as prefill-1")
    parser.add_argument("role", metavar="ROLE", help="prefill, decode or aggregated")
    add_frontend(parser)
    parser.set_defaults(run=_run_role)


def add_sleep(parser: Parser) -> None:
    """Add the arguments of `penstock sleep`."""
    parser.description = (
        "Have a running worker drain within worker.drain_timeout_s, give up the memory of its KV cache and weights,"
        " and take no requests until `penstock wake`. See docs/engines.md."
    )
    _add_worker(parser)
    parser.add_argument(
        "--level",
        type=int,
        default=1,
        metavar="N",
        help="1: weights go to host memory (default); 2: weights are dropped, and read again on waking",
    )
    parser.set_defaults(run=_run_sleep)


def add_wake(parser: Parser) -> None:
    """Add the arguments of `penstock wake`."""
    parser.description = "Have a worker that sleeps take its memory and requests again. See docs/engines.md."
    _add_worker(parser)
    parser.set_defaults(run=_run_wake)


def _run_scale(options: argparse.Namespace) -> int:

    known = [role.value for role in Role]
    if options.role is not None and options.role not in known:
        region, slash, role = options.role.removeprefix("link-").partition("/")
        if slash or region != options.role:
            role = role if role in known else "ROLE"
            raise ConfigError(
                f"ROLE: {options.role!r} is of region {region!r}, a deployment of its own that nobody scales from here; run"
                f" penstock scale {role} {options.count or 'N'} on one of its hosts"
            )
        raise ConfigError(f"ROLE: unknown {options.role!r}{nearest(options.role, known)}")
    if options.count is not None and not (options.count.isascii() and options.count.isdecimal()):
        raise ConfigError(f"N: must be a number of workers >= 0, got {options.count!r}")
    run_scale(
        None if options.role is None else Role(options.role),
        None if options.count is None else int(options.count),
        name=options.name,
        url=options.url,
        part=options.part,
        wait=not options.no_wait,
    )
    return 0


def _run_role(options: argparse.Namespace) -> int:

    known = [role.value for role in Role]
    if options.role not in known:
        raise ConfigError(f"ROLE: unknown {options.role!r}{nearest(options.role, known)}")
    run_role(frontend_of(options), options.worker, Role(options.role))
    return 0


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name in GET /admin/workers, such as worker-1")
    add_frontend(parser)


def _run_sleep(options: argparse.Namespace) -> int:

    run_sleep(frontend_of(options), options.worker, options.level)
    return 0


def _run_wake(options: argparse.Namespace) -> int:

    run_wake(frontend_of(options), options.worker)
    return 0


_TIMEOUT_S = 660.0  # the worker may have to drain first
_Outcome = TypeVar("_Outcome", WorkerRoleChanged, StateChanged)


def change_role(server: FrontendAddress, worker: str, role: Role) -> WorkerRoleChanged:
    """Ask a frontend for the change, and wait until the worker takes requests in its new role.

    Raises:
        ConfigError: the answer is of another version.
        RequestError: the worker does not exist, or cannot have that role.
        Unavailable: no server answers.
    """
    return _ask(server, worker, "role", {"role": role}, WorkerRoleChanged)


def sleep(server: FrontendAddress, worker: str, level: int) -> StateChanged:
    """Ask a frontend to have a worker sleep, and wait until it does; raises as `change_role`."""
    return _ask(server, worker, "sleep", {"level": level}, StateChanged)


def wake_up(server: FrontendAddress, worker: str) -> StateChanged:
    """Ask a frontend to wake a worker, and wait until it takes requests; raises as `change_role`."""
    return _ask(server, worker, "wake", {}, StateChanged)


def run_role(server: FrontendAddress, worker: str, role: Role) -> None:
    """Change the role and print the result."""
    changed = change_role(server, worker, role)
    sys.stdout.write(
        f"{changed.worker}: {changed.role} now, was {changed.before}; took {changed.took_s:.2f} s\n"
    )


def run_sleep(server: FrontendAddress, worker: str, level: int) -> None:
    """Have the worker sleep and print the result."""
    _print(sleep(server, worker, level))


def run_wake(server: FrontendAddress, worker: str) -> None:
    """Wake the worker and print the result."""
    _print(wake_up(server, worker))


def _print(changed: StateChanged) -> None:
    sys.stdout.write(f"{changed.worker}: {changed.state} now; took {changed.took_s:.2f} s\n")


def _ask(
    server: FrontendAddress, worker: str, what: str, body: dict[str, object], kind: type[_Outcome]
) -> _Outcome:
    path = f"/admin/workers/{quote(worker, safe='')}/{what}"
    answer = ask(server, path, body=msgspec.json.encode(body), timeout_s=_TIMEOUT_S)
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{server}: the answer is not Penstock's, or another version's: {error}") from error


_BY = "penstock scale"
_SEEN_S = 60.0


def run_scale(
    role: Role | None,
    count: int | None,
    *,
    name: str | None = None,
    url: str | None = None,
    part: str | None = None,
    wait: bool,
) -> None:
    """Show the workers, or change their number and wait until it is so.

    Args:
        role: the role to change or to show; None shows all.
        count: its workers from now on; None shows them.
        name: the graph's name, where several deployments run.
        url: their URL, likewise.
        part: which part of the deployment, where several run here.
        wait: wait until added workers are ready and retired ones have ended.

    Raises:
        ConfigError: several deployments run.
        RequestError: the deployment refuses, with the reason.
        Unavailable: no deployment runs, or it ended meanwhile.
    """
    asyncio.run(_run(role, count, name=name, url=url, part=part, wait=wait))


async def _run(
    role: Role | None, count: int | None, *, name: str | None, url: str | None, part: str | None, wait: bool
) -> None:
    connector = await find_deployment(name=name, url=url, part=part)
    scale = await connector.scale()
    if count is None or role is None:
        _write(_table(scale, role))
        if role is None:
            _write([_seen(await connector.observe(_SEEN_S))])
        return
    if role not in {limit.role for limit in scale.limits}:
        known = ", ".join(limit.role for limit in scale.limits)
        raise ConfigError(f"ROLE: {role} is not of this deployment, which has {known}")
    have = len(scale.of(role))
    if count == have:
        _write([f"{role}: {_counted(have)} already"])
        return
    if count > have:
        names: Sequence[str] = await connector.add(role, count - have, by=_BY, revision=scale.revision)
        _write([f"{role}: {have} -> {count}, starts {', '.join(names)}{_expected(scale, role)}"])
    else:
        names = scale.to_retire(role, have - count)
        await connector.retire(names, by=_BY, revision=scale.revision)
        _write([f"{role}: {have} -> {count}, drains {', '.join(names)}"])
    if wait:
        await _wait(connector, set(names))


async def _wait(connector: ScalingConnector, names: set[str]) -> None:
    """Print the changes of these workers until each is ready or gone.

    Raises:
        Unavailable: somebody retired a worker that was starting, or it fails to start.
    """
    seen: dict[str, tuple[ReplicaState, str]] = {}
    scale = await connector.scale()
    while True:
        found = {replica.name: replica for replica in scale.replicas if replica.name in names}
        for name in sorted(names - found.keys() if seen else ()):
            _write([f"{name:<11} stopped"])
            names.discard(name)
        for replica in found.values():
            if seen.get(replica.name) != (replica.state, replica.phase):
                seen[replica.name] = (replica.state, replica.phase)
                _write([f"{replica.name:<11} {replica.state:<9} {replica.phase}".rstrip()])
            if replica.state is ReplicaState.READY:
                names.discard(replica.name)
            elif replica.state is ReplicaState.FAILED:
                raise Unavailable(
                    f"{replica.name} failed to start: {replica.phase}; it is tried again, penstock scale shows how it goes"
                )
        if not names & {replica.name for replica in scale.replicas}:
            return
        scale = await connector.scale(scale.sequence)


def _table(scale: Scale, role: Role | None) -> Iterable[str]:
    """Format a line for each role, and below it one for each of its workers."""
    for limit in scale.limits:
        if role is not None and limit.role is not role:
            continue
        own = [replica for replica in scale.replicas if replica.role is limit.role]
        ready = sum(replica.state is ReplicaState.READY for replica in own)
        more = "" if limit.room is None else f", {limit.room} more may be added"
        yield f"{limit.role}: {_counted(len(scale.of(limit.role)))}, {ready} ready{more}"
        if limit.room == 0:
            yield f"  no more: {limit.why}"
        for replica in own:
            yield f"  {_line(replica)}"
    if scale.changed_by and role is None:
        yield f"last changed by {scale.changed_by} (revision {scale.revision})"


def _seen(observation: Observation) -> str:
    """Format the demand of the last minute."""
    demand = observation.demand
    ttft_s, itl_s = demand.ttft_s.quantile(0.9), demand.itl_s.quantile(0.9)
    parts = [f"{demand.arrivals_per_s:.2f} requests/s in the last {_SEEN_S:.0f} s"]
    if ttft_s is not None:
        parts.append(f"TTFT p90 {ttft_s * 1e3:.0f} ms")
    if itl_s is not None:
        parts.append(f"ITL p90 {itl_s * 1e3:.1f} ms")
    if demand.failed_per_s:
        parts.append(f"{demand.failed_per_s:.2f} failed/s")
    return ", ".join([*parts, f"{demand.queued} queued"])


def _line(replica: Replica) -> str:
    share = [f"GPU {device}" for device in replica.devices]
    if replica.core is not None:
        share.append(f"core {replica.core}")
    details = "  ".join(part for part in (replica.phase, ", ".join(share)) if part)
    return f"{replica.name:<11} {replica.state:<9} {replica.age_s:6.1f} s  {details}".rstrip()


def _expected(scale: Scale, role: Role) -> str:
    start_s = next((limit.start_s for limit in scale.limits if limit.role is role), None)
    return "" if start_s is None else f"; the last start took {start_s:.1f} s"


def _counted(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _write(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
