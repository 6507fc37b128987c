"""What the page says to look at: each fault is told once, and a sound deployment has none."""

import msgspec
import pytest

from penstock.core.types.instances import Role
from penstock.core.types.scaling import Replica, ReplicaState
from penstock.frontend.watch.alerts import alerts_of
from penstock.frontend.watch.overview import Overview, Percentiles, Round, Target
from penstock.router.workers.member import Condition
from tests.support import snapshots

SOUND = snapshots.view(1)
TARGET = Target(ttft_s=1.0, itl_s=0.05, percentile=90)
QUICK = Percentiles(count=9, mean=0.5, p50=0.5, p90=0.9, p99=2.0)
LATE_FOR_SOME = Percentiles(count=9, mean=0.5, p50=0.5, p90=1.5, p99=2.0)
LATE = Percentiles(count=9, mean=0.5, p50=1.5, p90=1.5, p99=2.0)
SEEN = Overview(name="d", seconds=10, ttft=QUICK, target=TARGET, planner=())
ROUND = Round(number=1, time_s=1.0, outcome="kept", text="no change")


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
