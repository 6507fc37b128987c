"""What the page is told: faults once each, and a snapshot that stays small however large the deployment is."""

import asyncio

import msgspec
import pytest

from penstock.core.clock import wall_time_s
from penstock.core.types.instances import Replica, ReplicaState, Role
from penstock.core.types.load import KvRead, KvTierCounts, LinkReport, WorkerLoad
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.watch.overview import LatencyTarget, Overview, Percentiles, PlannerRound
from penstock.frontend.watch.snapshot import ALERTS_MAX, WORKERS_MAX, alerts_of, take_snapshot
from penstock.router.fleet.member import Condition
from tests.support import snapshots
from tests.support.dispatcher import ScriptedDispatcher

SOUND = snapshots.view(1)
TARGET = LatencyTarget(ttft_s=1.0, itl_s=0.05, percentile=90)
QUICK = Percentiles(count=9, mean=0.5, p50=0.5, p90=0.9, p99=2.0)
LATE_FOR_SOME = Percentiles(count=9, mean=0.5, p50=0.5, p90=1.5, p99=2.0)
LATE = Percentiles(count=9, mean=0.5, p50=1.5, p90=1.5, p99=2.0)
SEEN = Overview(name="d", seconds=10, ttft=QUICK, target=TARGET, planner=())
ROUND = PlannerRound(number=1, time_s=1.0, outcome="kept", text="no change")


def worker(**fields):
    return msgspec.structs.replace(SOUND, **fields)


def tier(**fields):
    return {"kv_tiers": [{"tier": "disk", "is_off": False, "corrupt_blocks": 0} | fields]}


def seen(**fields):
    return msgspec.structs.replace(SEEN, **fields)


def test_a_sound_deployment_has_no_alert():
    assert alerts_of([SOUND, worker(name="p", condition=Condition.PREFILL_ONLY, load=tier())], SEEN, "") == []
    assert alerts_of([SOUND], None, "") == []


@pytest.mark.parametrize(
    ("workers", "overview", "severity", "says"),
    [
        ([], SEEN, "error", "no worker can answer"),
        ([SOUND, worker(name="w2", condition=Condition.LOST)], SEEN, "warning", "w2: its connection ended"),
        ([SOUND, worker(name="w2", condition=Condition.UNHEALTHY, problem="server away")], SEEN, "warning", "w2: server away"),
        ([SOUND, worker(name="w2", condition=Condition.ASLEEP)], SEEN, "info", "it sleeps"),
        ([worker(kv_transfer_problem="no transport")], SEEN, "warning", "no KV transfer: no transport"),
        ([worker(load=tier(is_off=True))], SEEN, "warning", "KV tier disk is off"),
        ([worker(load=tier(corrupt_blocks=3))], SEEN, "warning", "3 blocks had other bytes"),
        ([SOUND], seen(silent=("worker-2",)), "error", "worker-2 has been silent"),
        ([SOUND], seen(replicas=(Replica(name="w3", role=Role.DECODE, state=ReplicaState.FAILED, phase="killed"),)), "error", "w3 failed: killed"),
        ([SOUND], seen(replicas=(Replica(name="w3", role=Role.DECODE, state=ReplicaState.STARTING),)), "info", "w3 starts: begins"),
        ([SOUND], seen(ttft=LATE_FOR_SOME), "warning", "TTFT is past its target of 1000 ms for one request in ten"),
        ([SOUND], seen(ttft=LATE), "error", "TTFT is past its target of 1000 ms for most"),
        ([SOUND], seen(queued=4, oldest_queued_s=20.0), "warning", "4 requests wait"),
        (
            [SOUND],
            seen(planner=(msgspec.structs.replace(ROUND, shortfall="2 GPUs too few"), ROUND)),
            "error",
            "out of reach with what may run: 2 GPUs too few",
        ),
        ([SOUND], seen(planner=(msgspec.structs.replace(ROUND, outcome="blind"),)), "warning", "planner sees no"),
    ],
)  # fmt: skip
def test_each_fault_is_told_once(workers, overview, severity, says):
    (alert,) = alerts_of(workers, overview, "")
    assert (alert.severity, says in alert.text) == (severity, True), alert


def test_the_worst_comes_first_and_a_silent_supervisor_is_said():
    found = alerts_of([worker(condition=Condition.ASLEEP)], None, "no answer in 2 s")
    assert [alert.severity for alert in found] == ["error", "warning", "info"]
    assert "no answer in 2 s" in found[1].text


def test_without_a_target_no_latency_is_late():
    assert alerts_of([SOUND], seen(ttft=LATE, target=None), "") == []


LOAD = WorkerLoad(
    running_requests=3,
    active_blocks=10,
    cached_blocks=60,
    total_blocks=100,
    prefilled_tokens=500,
    prefix_hit_tokens=400,
    onboarded_tokens=(100, 50),
    kv_tiers=(
        KvTierCounts(tier="host", total_blocks=200, cached_blocks=20, hit_tokens=100),
        KvTierCounts(tier="disk", total_blocks=900, cached_blocks=90, hit_tokens=50, is_off=True),
    ),
    kv_reads=(
        KvRead(prefill_worker=2, transport="shm", num_bytes=4096, seconds=0.5),
        KvRead(prefill_worker=999_999, transport="tcp", num_bytes=1, seconds=0.1),
    ),
)


def decode_worker(number, condition=Condition.READY, load=LOAD):
    where = {
        "address": f"tcp://10.0.0.{number % 256}:7000",
        "host": "a-host-with-quite-a-long-name.example.com",
    }
    return snapshots.view(
        number, load, name=f"worker-{number:04}", role=Role.DECODE, condition=condition, **where
    )


class Fleet(ScriptedDispatcher):
    def __init__(self, views):
        super().__init__(None)
        self.views = views

    def workers(self):
        return self.views


def snapshot_of(views):
    async def main():
        frontend = Frontend(FrontendConfig(), Fleet(views), hash_key=bytes(16))
        return await take_snapshot(frontend, None)

    return asyncio.run(main())


def test_a_thousand_workers_that_are_all_lost_give_a_bounded_snapshot():
    found = snapshot_of([decode_worker(number, Condition.LOST) for number in range(1000)])
    assert (found.num_workers, len(found.workers), len(found.alerts)) == (1000, WORKERS_MAX, ALERTS_MAX)
    assert found.alerts[0].severity == "error"
    assert len(msgspec.json.encode(found)) < 200_000


def test_tiers_and_links_of_a_worker_are_shown():
    found = snapshot_of([decode_worker(2), decode_worker(1)])
    first, second = found.workers
    assert (first.name, second.name) == ("worker-0001", "worker-0002")
    tiers = [
        (tier.tier, tier.cached_blocks, tier.active_blocks, tier.hit_tokens, tier.is_off)
        for tier in first.tiers
    ]
    assert tiers == [("device", 60, 10, 250, False), ("host", 20, 0, 100, False), ("disk", 90, 0, 50, True)]
    assert [link.source for link in first.links] == ["worker-0002", "a worker that left"]
    assert {alert.key for alert in found.alerts} == {f"off worker-000{n}: KV tier disk" for n in (1, 2)}


def test_a_link_shows_how_far_its_region_is_and_when_it_told_last():
    def row(**link):
        load = WorkerLoad(link=LinkReport(region="eu", frontends=2, healthy=1, **link))
        (found,) = snapshot_of([decode_worker(1, load=load)]).workers
        return found.region

    told = row(round_trip_s=0.081, advertised_chunks=12, advertised_at_s=wall_time_s() - 5)
    assert (told.name, told.frontends, told.healthy) == ("eu", 2, 1)
    assert (told.round_trip_s, told.advertised_chunks) == (0.081, 12)
    assert 5 <= told.advertised_age_s < 60
    untold = row()
    assert (untold.round_trip_s, untold.advertised_age_s) == (None, None)
    assert snapshot_of([decode_worker(1)]).workers[0].region is None
