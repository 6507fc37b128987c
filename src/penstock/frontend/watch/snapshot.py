"""Everything that the page shows at one moment; bounded whatever the deployment's size."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock import __version__
from penstock.core.clock import wall_time_s
from penstock.core.errors import PenstockError
from penstock.frontend.frontend import Frontend
from penstock.frontend.tenants.usage import TenantUse
from penstock.frontend.watch.alerts import Alert, alerts_of
from penstock.frontend.watch.overview import Overview, Speed, Supervisor
from penstock.router.explain.explanation import Explanation
from penstock.router.workers.member import WorkerView

WORKERS_MAX = 128
TENANTS_MAX = 64
ALERTS_MAX = 32
REQUESTS = 24
DECISIONS = 12
_CANDIDATES_MAX = 5
_OVERVIEW_TIMEOUT_S = 2.0


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one tier of a worker; `active` are of live requests and sessions."""

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
    sessions: int
    speed: Speed | None
    tiers: tuple[TierRow, ...]
    links: tuple[LinkRow, ...]
    region: RegionRow | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
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


async def take_snapshot(frontend: Frontend, supervisor: Supervisor | None) -> Snapshot:
    """Look at everything once."""
    overview, problem = await _overview(supervisor)
    dispatcher, page = frontend.dispatcher, frontend.config.page
    known = (view for view in dispatcher.workers() if isinstance(view, WorkerView))
    views = sorted(known, key=lambda view: view.name)
    names = {view.worker_id: view.name for view in views}
    speeds = {} if overview is None else overview.speeds
    queued, _ = dispatcher.queued()
    return Snapshot(
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


async def _overview(supervisor: Supervisor | None) -> tuple[Overview | None, str]:
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


def _row(view: WorkerView, names: dict[int, str], speed: Speed | None) -> WorkerRow:
    load: dict[str, Any] = view.load or {}

    def count(name: str) -> int:
        return int(load.get(name, 0))

    sessions = load.get("sessions")
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
        sessions=0 if sessions is None else sessions.open,
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
    if not isinstance(decision, Explanation):
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
