"""What somebody should look at now, each with what to do about it."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from penstock.core.types.instances import ReplicaState
from penstock.frontend.watch.overview import Overview
from penstock.router.workers.member import Condition, WorkerView

_OLD_QUEUE_S = 10.0
_SERVES = frozenset({Condition.READY, Condition.PREFILL_ONLY})
_WHY = {
    Condition.LOST: "its connection ended; its requests go on elsewhere",
    Condition.CONNECTING: "it was never reached so far",
    Condition.DRAINING: "it drains: it finishes what it has",
    Condition.ASLEEP: "it sleeps; penstock wake brings it back",
    Condition.WITHDRAWN: "it has left; it finishes what it has",
}
_EXPECTED = frozenset({Condition.DRAINING, Condition.ASLEEP, Condition.WITHDRAWN})


class Severity(StrEnum):
    ERROR = "error"  # requests fail, or soon will
    WARNING = "warning"  # slower, or with less room than meant
    INFO = "info"  # as somebody asked


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to look at; `key` stays the same while it lasts."""

    key: str
    severity: Severity
    text: str


def alerts_of(workers: Sequence[WorkerView], overview: Overview | None, problem: str) -> list[Alert]:
    """List what is wrong, the worst first.

    Args:
        workers: as the router knows them.
        overview: of the deployment; None where there is no supervisor.
        problem: why there is no overview; empty where there is one, or none is expected.
    """
    found = [*_serving(workers), *_workers(workers), *_tiers(workers)]
    if problem:
        found.append(_warning("supervisor", f"the supervisor does not answer: {problem}"))
    if overview is not None:
        found += [*_processes(overview), *_latency(overview), *_planner(overview)]
    order = list(Severity)
    return sorted(found, key=lambda alert: order.index(alert.severity))


def _serving(workers: Sequence[WorkerView]) -> Iterator[Alert]:
    if not any(view.condition is Condition.READY for view in workers):
        yield _error("no-worker", "no worker can answer: requests wait, and then get 503")


def _workers(workers: Sequence[WorkerView]) -> Iterator[Alert]:
    for view in workers:
        if view.condition not in _SERVES:
            why = view.problem or _WHY.get(view.condition, view.condition.value)
            severity = Severity.INFO if view.condition in _EXPECTED else Severity.WARNING
            yield Alert(key=f"worker {view.name}", severity=severity, text=f"{view.name}: {why}")
        elif view.kv_transfer_problem:
            yield _warning(
                f"transfer {view.name}", f"{view.name}: no KV transfer: {view.kv_transfer_problem}"
            )


def _tiers(workers: Sequence[WorkerView]) -> Iterator[Alert]:
    for view in workers:
        for tier in () if view.load is None else view.load["kv_tiers"]:
            name = f"{view.name}: KV tier {tier['tier']}"
            if tier["is_off"]:
                yield _warning(
                    f"off {name}",
                    f"{name} is off: it failed or hung, and is tried again; prompts are computed",
                )
            if tier["corrupt_blocks"]:
                yield _warning(
                    f"corrupt {name}",
                    f"{name}: {tier['corrupt_blocks']} blocks had other bytes than were written; look at that memory or disk",
                )


def _processes(overview: Overview) -> Iterator[Alert]:
    for name in overview.silent:
        yield _error(f"silent {name}", f"{name} has been silent for 5 s or more: it hangs, or has no CPU")
    for replica in overview.replicas:
        if replica.state is ReplicaState.FAILED:
            yield _error(f"failed {replica.name}", f"{replica.name} failed: {replica.phase}")
        elif replica.state is ReplicaState.STARTING:
            yield Alert(
                key=f"starting {replica.name}",
                severity=Severity.INFO,
                text=f"{replica.name} starts: {replica.phase or 'begins'}",
            )


def _latency(overview: Overview) -> Iterator[Alert]:
    target = overview.target
    if overview.oldest_queued_s > _OLD_QUEUE_S:
        yield _warning("queue", f"{overview.queued} requests wait for a worker, the oldest for long")
    if target is None:
        return
    for name, seen, wanted_s in (
        ("TTFT", overview.ttft, target.ttft_s),
        ("ITL", overview.itl, target.itl_s),
    ):
        if seen is not None and seen.p50 > wanted_s:
            yield _error(
                f"slo {name}", f"{name} is past its target of {wanted_s * 1e3:g} ms for most requests"
            )
        elif seen is not None and seen.p90 > wanted_s:
            yield _warning(
                f"slo {name}", f"{name} is past its target of {wanted_s * 1e3:g} ms for one request in ten"
            )


def _planner(overview: Overview) -> Iterator[Alert]:
    last = overview.planner[0] if overview.planner else None
    if last is not None and last.shortfall:
        yield _error("shortfall", f"the SLO is out of reach with what may run: {last.shortfall}")
    if last is not None and last.outcome == "blind":
        yield _warning("blind", "the planner sees no demand and no workers, and keeps what there is")


def _error(key: str, text: str) -> Alert:
    return Alert(key=key, severity=Severity.ERROR, text=text)


def _warning(key: str, text: str) -> Alert:
    return Alert(key=key, severity=Severity.WARNING, text=text)
