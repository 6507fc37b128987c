"""What the live page shows at one moment, built at most once a second while somebody watches; bounded whatever the deployment's size."""

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from penstock import __version__
from penstock.core.clock import wall_time_s
from penstock.core.errors import Overloaded, PenstockError
from penstock.core.json_text import encode_json
from penstock.core.types.instances import ReplicaState
from penstock.frontend.frontend import Frontend
from penstock.frontend.limits.tenants import TenantUse
from penstock.frontend.watch.overview import DeploymentSupervisor, Overview, WorkerSpeed
from penstock.router.explanations import RoutingExplanation
from penstock.router.fleet.member import Condition, FleetWorkerView

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


def alerts_of(workers: Sequence[FleetWorkerView], overview: Overview | None, problem: str) -> list[Alert]:
    """List what is wrong, the worst first.

    Args:
        workers: as the router knows them.
        overview: of the deployment; None where there is no supervisor.
        problem: why there is no overview; empty where there is one, or none is expected.
    """
    found = [*_serving(workers), *_workers(workers), *_tier_alerts(workers)]
    if problem:
        found.append(_warning("supervisor", f"the supervisor does not answer: {problem}"))
    if overview is not None:
        found += [*_processes(overview), *_latency(overview), *_planner(overview)]
    order = list(Severity)
    return sorted(found, key=lambda alert: order.index(alert.severity))


def _serving(workers: Sequence[FleetWorkerView]) -> Iterator[Alert]:
    if not any(view.condition is Condition.READY for view in workers):
        yield _error("no-worker", "no worker can answer: requests wait, and then get 503")


def _workers(workers: Sequence[FleetWorkerView]) -> Iterator[Alert]:
    for view in workers:
        if view.condition not in _SERVES:
            why = view.problem or _WHY.get(view.condition, view.condition.value)
            severity = Severity.INFO if view.condition in _EXPECTED else Severity.WARNING
            yield Alert(key=f"worker {view.name}", severity=severity, text=f"{view.name}: {why}")
        elif view.kv_transfer_problem:
            yield _warning(
                f"transfer {view.name}", f"{view.name}: no KV transfer: {view.kv_transfer_problem}"
            )


def _tier_alerts(workers: Sequence[FleetWorkerView]) -> Iterator[Alert]:
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


WORKERS_MAX = 128
TENANTS_MAX = 64
ALERTS_MAX = 32
REQUESTS = 24
DECISIONS = 12
_CANDIDATES_MAX = 5
_OVERVIEW_TIMEOUT_S = 2.0


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one tier of a worker; `active` are of live requests and pins."""

    tier: str
    total_blocks: int
    cached_blocks: int
    active_blocks: int = 0
    is_off: bool = False
    hit_tokens: int = 0


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """KV that a worker has read from another one since its start."""

    source: str
    transport: str
    num_bytes: int
    seconds: float


class RegionRow(msgspec.Struct, frozen=True, kw_only=True):
    """The region that a worker is the link to.

    Attributes:
        round_trip_s: measured time there and back; None before the first answer.
        healthy: of its `frontends`, those that answer.
        advertised_age_s: seconds since its last prefix summary; None before the first.
    """

    name: str
    round_trip_s: float | None
    frontends: int
    healthy: int
    advertised_chunks: int
    advertised_age_s: float | None


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: figures of its last report, totals since its start."""

    name: str
    model: str
    role: str
    condition: str
    problem: str | None
    host: str
    pid: int
    running: int
    waiting: int
    open_requests: int
    prefilled_tokens: int
    hit_tokens: int
    generated_tokens: int
    preemptions: int
    speed: WorkerSpeed | None
    tiers: tuple[TierRow, ...]
    links: tuple[LinkRow, ...]
    region: RegionRow | None = None


class PageSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend process tells its watchers.

    Attributes:
        pid: of the frontend; `requests` and `decisions` are those that came to it.
        num_workers: of which at most 128 are listed.
        requests: the ways of the latest requests.
        decisions: the latest of the router, oldest first.
        can_kill: whether the page may kill workers.
    """

    time_s: float
    version: str
    pid: int
    models: tuple[str, ...]
    queued: int
    num_workers: int
    workers: tuple[WorkerRow, ...]
    requests: Sequence[object]
    decisions: Sequence[object]
    tenants: tuple[TenantUse, ...]
    alerts: tuple[Alert, ...]
    overview: Overview | None
    can_kill: bool


async def take_snapshot(frontend: Frontend, supervisor: DeploymentSupervisor | None) -> PageSnapshot:
    """Look at everything once."""
    overview, problem = await _overview(supervisor)
    dispatcher, page = frontend.dispatcher, frontend.config.page
    known = (view for view in dispatcher.workers() if isinstance(view, FleetWorkerView))
    views = sorted(known, key=lambda view: view.name)
    names = {view.worker_id: view.name for view in views}
    speeds = {} if overview is None else overview.speeds
    queued, _ = dispatcher.queued()
    return PageSnapshot(
        time_s=wall_time_s(),
        version=__version__,
        pid=os.getpid(),
        models=tuple(sorted(dispatcher.models())),
        queued=queued if overview is None else overview.queued,
        num_workers=len(views),
        workers=tuple(_row(view, names, speeds.get(view.name)) for view in views[:WORKERS_MAX]),
        requests=dispatcher.latest_journeys(REQUESTS),
        decisions=[_shortened(each) for each in dispatcher.latest_decisions(DECISIONS)],
        tenants=tuple(frontend.access.tenants.uses()[:TENANTS_MAX]),
        alerts=tuple(alerts_of(views, overview, problem)[:ALERTS_MAX]),
        overview=None if overview is None else msgspec.structs.replace(overview, speeds={}),
        can_kill=page.kills_workers and supervisor is not None,
    )


async def _overview(supervisor: DeploymentSupervisor | None) -> tuple[Overview | None, str]:
    """Ask the supervisor, and say why it does not answer."""
    if supervisor is None:
        return None, ""
    try:
        async with asyncio.timeout(_OVERVIEW_TIMEOUT_S):
            return await supervisor.overview(), ""
    except PenstockError as error:
        return None, error.message
    except TimeoutError:
        return None, f"no answer in {_OVERVIEW_TIMEOUT_S:g} s"


def _row(view: FleetWorkerView, names: dict[int, str], speed: WorkerSpeed | None) -> WorkerRow:
    load: dict[str, Any] = view.load or {}

    def count(name: str) -> int:
        return int(load.get(name, 0))

    return WorkerRow(
        name=view.name,
        model=view.model,
        role=view.role,
        condition=view.condition,
        problem=view.problem,
        host=view.host,
        pid=view.pid,
        running=count("running_requests"),
        waiting=count("waiting_requests"),
        open_requests=view.open_requests,
        prefilled_tokens=count("prefilled_tokens"),
        hit_tokens=count("prefix_hit_tokens"),
        generated_tokens=count("generated_tokens"),
        preemptions=count("preemptions"),
        speed=speed,
        tiers=tuple(_tiers(load)),
        links=tuple(
            LinkRow(
                source=names.get(read.prefill_worker, "a worker that left"),
                transport=read.transport,
                num_bytes=read.num_bytes,
                seconds=read.seconds,
            )
            for read in load.get("kv_reads", ())
        ),
        region=None if load.get("link") is None else _region(load["link"]),
    )


def _region(link: dict[str, Any]) -> RegionRow:
    advertised_at_s = link["advertised_at_s"]
    return RegionRow(
        name=link["region"],
        round_trip_s=link["round_trip_s"] or None,
        frontends=link["frontends"],
        healthy=link["healthy"],
        advertised_chunks=link["advertised_chunks"],
        advertised_age_s=max(wall_time_s() - advertised_at_s, 0.0) if advertised_at_s else None,
    )


def _tiers(load: dict[str, Any]) -> Iterable[TierRow]:
    if not load.get("total_blocks"):
        return
    below = load["kv_tiers"]
    yield TierRow(
        tier="device",
        total_blocks=load["total_blocks"],
        cached_blocks=load["cached_blocks"],
        active_blocks=load["active_blocks"],
        hit_tokens=max(load["prefix_hit_tokens"] - sum(load["onboarded_tokens"]), 0),
    )
    for tier in below:
        yield TierRow(
            tier=tier["tier"],
            total_blocks=tier["total_blocks"],
            cached_blocks=tier["cached_blocks"],
            is_off=tier["is_off"],
            hit_tokens=tier["hit_tokens"],
        )


def _shortened(decision: object) -> object:
    """List fewer candidates."""
    if not isinstance(decision, RoutingExplanation):
        return decision
    prefill = decision.prefill
    if prefill is not None:
        prefill = msgspec.structs.replace(prefill, candidates=prefill.candidates[:_CANDIDATES_MAX])
    return msgspec.structs.replace(
        decision,
        candidates=decision.candidates[:_CANDIDATES_MAX],
        left_out=decision.left_out[:_CANDIDATES_MAX],
        prefill=prefill,
    )


INTERVAL_S = 1.0
WATCHERS_MAX = 16


class SnapshotFeed:
    """The latest snapshot, encoded once for all. One event loop owns it."""

    def __init__(self, frontend: Frontend, supervisor: DeploymentSupervisor | None) -> None:
        self._frontend = frontend
        self._supervisor = supervisor
        self._taking = asyncio.Lock()
        self._taken_s = float("-inf")
        self._latest = b""
        self.watchers = 0

    def arrive(self) -> None:
        """Count a watcher; `leave` is due.

        Raises:
            Overloaded: too many watch already.
        """
        if self.watchers >= WATCHERS_MAX:
            raise Overloaded(
                f"{WATCHERS_MAX} watch this server already, the limit; close a page, or try again later",
                retry_after_s=10.0,
            )
        self.watchers += 1

    def leave(self) -> None:
        """Count a watcher no more."""
        self.watchers -= 1

    async def snapshot(self) -> bytes:
        """Give a snapshot that is at most a second old, as JSON."""
        loop = asyncio.get_running_loop()
        async with self._taking:
            if loop.time() - self._taken_s >= INTERVAL_S:
                self._latest = encode_json(await take_snapshot(self._frontend, self._supervisor))
                self._taken_s = loop.time()
            return self._latest
