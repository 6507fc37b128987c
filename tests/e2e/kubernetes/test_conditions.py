"""What users see in `status.conditions` when pods do not run, or are taken away."""

import pytest

from tests.e2e.kubernetes.conftest import PAIR
from tests.support.given_by import given_by

pytestmark = pytest.mark.slow


@given_by("site")
async def test_a_pod_that_does_not_run_is_said_and_its_end_too(here):
    """Of many pods with one problem three are named."""
    for replicas, trouble, reason, said in (
        (9, "unschedulable", "Unschedulable", "no node takes it: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu"),
        (1, "image", "ImagePullFailed", "image r/penstock:1: Back-off pulling image"),
        (2, "crash", "CrashLoop", "ended 6 times, last with exit code 137 (OOMKilled); kubectl logs --previous"),
        (3, "config", "ConfigMissing", 'secret "chat-secret" not found'),
    ):  # fmt: skip
        here.cluster.troubles["decode"] = trouble
        await here.apply(roles=PAIR | {"decode": {"replicas": replicas}}, block_size=16 + replicas)
        message = await here.says("Degraded", reason)
        assert said in message
        assert message.startswith("chat-decode-")
        if trouble == "unschedulable":
            await here.says("Degraded", "and 6 more")
            ready = await here.says("Ready", "NoWorkers", status="False")
            assert "no worker of decode is ready" in ready
            assert (await here.status())["summary"] == reason
        here.cluster.troubles.clear()
        await here.serves()
        assert (await here.status())["summary"] == "Serving"


@given_by("site")
async def test_a_change_that_cannot_start_stops_nothing(here):
    await here.up()
    since, old = (await here.condition("Ready"))["lastTransitionTime"], here.names("decode")
    here.cluster.troubles = {"decode": "image", "prefill": "image"}
    await here.apply(options={"image": "r/none:2"})
    assert "r/none:2" in await here.says("Degraded", "ImagePullFailed")
    for _ in range(20):
        await here.until(lambda: True)
    assert old <= here.names("decode"), "the old ones go on"
    ready = await here.condition("Ready")
    assert (ready["status"], ready["lastTransitionTime"]) == ("True", since)


@given_by("site")
async def test_an_evicted_pod_drains_and_is_replaced(here):
    await here.up()
    here.cluster.held = {"decode"}
    pod = min(here.names("decode"))
    await here.evict(pod)
    message = await here.says("Progressing", "EvictionByEvictionAPI")
    assert f"{pod} drains (EvictionByEvictionAPI: Eviction API: evicting)" in message
    assert (await here.condition("Ready"))["status"] == "True"
    assert (await here.condition("Degraded"))["status"] == "False", "a drain is no fault"
    here.cluster.held = set()
    await here.serves()
    assert pod not in here.names("decode")


@given_by("site")
async def test_a_planner_or_a_picker_that_does_not_run_is_said_and_stops_nothing(here):
    here.cluster.troubles = {"planner": "image", "picker": "image"}
    options = {"image": "r/penstock:1", "gateway": "entry"}
    await here.apply(options=options, model="org/model", planner={"max_workers": 4})
    for part in ("planner", "picker"):
        await here.says("Degraded", f"chat-{part}-")
    assert (await here.condition("Degraded"))["reason"] == "ImagePullFailed"
    await here.says("Ready", "")
    assert (await here.status())["workers"] == "3/3"
    ready = await here.parts("ready")
    assert (ready["planner"], ready["picker"]) == (0, 0)
