"""`penstock scale`: shows and changes how many workers each role of a running deployment has."""

import asyncio
import sys
from collections.abc import Iterable, Sequence

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import Replica, ReplicaState, Role, Scale
from penstock.deploy.control.deployments import find_deployment
from penstock.planner.observe.observation import Observation
from penstock.seams import ScalingConnector

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
