"""Snapshots of deployments that are not there, for whatever shows them."""

from typing import Any

import msgspec

from penstock.core.ids import RequestId
from penstock.core.types.events import Tier
from penstock.core.types.instances import InstanceState, Role
from penstock.core.types.load import WorkerLoad
from penstock.frontend.limits.tenants import TenantUse
from penstock.frontend.watch.overview import (
    LatencyTarget,
    Overview,
    Percentiles,
    PlannerRound,
    RoleTermView,
    WorkerSpeed,
)
from penstock.frontend.watch.snapshot import Alert, LinkRow, PageSnapshot, Severity, TierRow, WorkerRow
from penstock.router.dispatch.state import Journey, LegPart, LegView
from penstock.router.explanations import (
    Candidate,
    LeftOut,
    PrefillExplanation,
    RouteReason,
    RoutingExplanation,
)
from penstock.router.fleet.member import Condition, FleetWorkerView


def worker(name: str, **fields: Any) -> WorkerRow:
    """Give a worker that has something to show in each field; `fields` replace some."""
    tiers = (
        TierRow(tier="device", total_blocks=400, cached_blocks=240, active_blocks=80, hit_tokens=5000),
        TierRow(tier="host", total_blocks=900, cached_blocks=90, hit_tokens=1000),
        TierRow(tier="disk", total_blocks=9000, cached_blocks=900, hit_tokens=500, is_off=True),
    )
    known: dict[str, Any] = {
        "model": "tiny",
        "role": "decode",
        "condition": "ready",
        "problem": None,
        "host": "host-a",
        "pid": 4711,
        "running": 2,
        "waiting": 1,
        "open_requests": 3,
        "prefilled_tokens": 2500,
        "hit_tokens": 6500,
        "generated_tokens": 3000,
        "preemptions": 4,
        "speed": WorkerSpeed(prefilled_tokens_per_s=100.0, generated_tokens_per_s=50.0, step_s=0.02),
        "tiers": tiers,
        "links": (LinkRow(source="prefill-1", transport="shm", num_bytes=4_000_000, seconds=0.5),),
    }
    return WorkerRow(name=name, **(known | fields))


def view(worker_id: int, load: WorkerLoad | None = None, **fields: Any) -> FleetWorkerView:
    """Give a ready worker as routers see it."""
    shown = None
    if load is not None:
        tiers = [msgspec.structs.asdict(tier) for tier in load.kv_tiers]
        link = None if load.link is None else msgspec.structs.asdict(load.link)
        shown = msgspec.structs.asdict(load) | {"kv_tiers": tiers, "link": link}
    known: dict[str, Any] = {
        "name": f"worker-{worker_id}", "model": "tiny", "role": Role.AGGREGATED, "state": InstanceState.READY,
        "condition": Condition.READY, "problem": None, "kv_transfer_problem": None, "address": "", "host": "", "rack": "", "zone": "",
        "region": "", "pid": 1, "connections": 1, "open_requests": 0, "reserved_requests": 0, "reserved_prefill_tokens": 0,
        "reserved_blocks": 0, "indexed_blocks": 0, "predicted": False, "adapters": (), "event_sequence": None, "event_resyncs": 0,
    }  # fmt: skip
    return FleetWorkerView(worker_id=worker_id, **({"load": shown} | known | fields))


def journey(request_id: str, *workers: str, **fields: Any) -> Journey:
    """Give a request that has ended: of two workers the first is of prefill."""
    parts = [LegPart.PREFILL, LegPart.DECODE] if len(workers) > 1 else [LegPart.WHOLE]
    legs = tuple(
        LegView(
            worker=name,
            part=part,
            sent_s=0.01 + 0.1 * at,
            first_token_s=0.1 + 0.1 * at,
            ended_s=0.11 + 0.4 * at,
        )
        for at, (name, part) in enumerate(zip(workers, parts, strict=False))
    )
    known: dict[str, Any] = {
        "model": "tiny",
        "tenant": "",
        "age_s": 1.0,
        "seconds": 0.6,
        "outcome": "stop",
        "prompt_tokens": 300,
        "cached_tokens": 200,
        "output_tokens": 20,
        "queued_s": 0.01,
        "migrations": 0,
    }
    return Journey(request_id=RequestId(request_id), legs=legs, **(known | fields))


def decision(request_id: str, worker_name: str, *, prefill: str = "", **fields: Any) -> RoutingExplanation:
    """Give a decision with terms, a second candidate, and a worker that was left out."""

    def candidate(name: str, cost: float) -> Candidate:
        terms = {"prefill": cost - 10.0, "itl": 10.0}
        return Candidate(
            worker=name, cost=cost, terms=terms, overlap_blocks=12, tier_blocks={Tier.DEVICE: 12}
        )

    known: dict[str, Any] = {
        "model": "tiny",
        "adapter": None,
        "policy": "kv",
        "reason": RouteReason.LONGEST_PREFIX,
        "unit": "ms",
        "next_worker": "decode-9",
        "request_tokens": 300,
        "request_blocks": 18,
        "block_size": 16,
        "age_s": 1.0,
        "num_candidates": 2,
        "candidates": (candidate(worker_name, 25.0), candidate("decode-9", 31.0)),
        "num_left_out": 1,
        "left_out": (LeftOut(worker="decode-8", why="busy"),),
        "prefill": PrefillExplanation(
            remote=True, worker=prefill, local=90.0, local_worker=worker_name, prefill=40.0, prefill_worker=prefill,
            decode=20.0, decode_worker=worker_name, num_candidates=1, candidates=(candidate(prefill, 40.0),),
        ) if prefill else None,
    }  # fmt: skip
    return RoutingExplanation(request_id=request_id, worker=worker_name, **(known | fields))


def overview(**fields: Any) -> Overview:
    """Give an overview with latencies, a target and a planner."""
    some = Percentiles(count=100, mean=0.03, p50=0.025, p90=0.06, p99=0.2)
    term = RoleTermView(role=Role.DECODE, now=3, floor=1, reaction=4, keep=2, choice=4, why_not_fewer="itl")
    known: dict[str, Any] = {
        "seconds": 10.0,
        "arrivals_per_s": 7.5,
        "finished_per_s": 7.0,
        "output_tokens_per_s": 1234.0,
        "cached_share": 0.6,
        "ttft": some,
        "itl": some,
        "frontends": ("frontend-1",),
        "target": LatencyTarget(ttft_s=0.5, itl_s=0.1, percentile=90.0),
        "planner": (
            PlannerRound(
                number=7, time_s=1.8e9, outcome="scaled", text="decode 3 to 4: demand", terms=(term,)
            ),
        ),
    }
    return Overview(name="site", **(known | fields))


def snapshot(**fields: Any) -> PageSnapshot:
    """Give a deployment of three workers with a request; `fields` replace parts of it."""
    known: dict[str, Any] = {
        "time_s": 1.8e9,
        "version": "0.1.0",
        "pid": 42,
        "models": ("tiny",),
        "queued": 0,
        "workers": (worker("decode-1"), worker("decode-2", running=9), worker("prefill-1", role="prefill", condition="prefill_only", links=())),
        "requests": (journey("aaaa-0", "prefill-1", "decode-1"),),
        "decisions": (decision("aaaa-0", "decode-1", prefill="prefill-1"),),
        "tenants": (TenantUse(name="acme", inflight=2, concurrency=8, requests_per_s=5.0, tokens_per_min=6000.0, tokens_left=-20.0),),
        "alerts": (),
        "overview": overview(),
        "can_kill": True,
    }  # fmt: skip
    made = known | fields
    return PageSnapshot(num_workers=made.pop("num_workers", len(made["workers"])), **made)


def body(**fields: Any) -> bytes:
    """Give a snapshot as the server sends it."""
    return msgspec.json.encode(snapshot(**fields))


def alert(text: str, severity: Severity = Severity.WARNING) -> Alert:
    return Alert(key=text, severity=severity, text=text)
