"""What users see in `status.conditions` when pods do not run, or are taken away."""

import pytest

from tests.support.coroutines import given_by

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("trouble", "reason", "said"),
    [
        (
            "unschedulable",
            "Unschedulable",
            r"no node takes it: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu",
        ),
        ("image", "ImagePullFailed", r"image r/penstock:1: Back-off pulling image"),
        (
            "crash",
            "CrashLoop",
            r"ended 6 times, last with exit code 137 (OOMKilled); kubectl logs --previous",
        ),
        ("config", "ConfigMissing", r'secret "chat-secret" not found'),
    ],
)
@given_by("site")
async def test_a_pod_that_does_not_run_is_said_and_its_end_too(here, trouble, reason, said):
    here.cluster.troubles["decode"] = trouble
    await here.apply()
    message = await here.is_true("Degraded", reason)
    assert said in message
    assert message.startswith("chat-decode-")
    ready = await here.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NoWorkers")
    assert "no worker of decode is ready" in ready["message"]
    assert (await here.status())["summary"] == reason
    here.cluster.troubles.clear()
    await here.serves()
    assert (await here.status())["summary"] == "Serving"


@given_by("site")
async def test_a_change_that_cannot_start_stops_nothing(here):
    await here.apply()
    await here.serves()
    since = (await here.condition("Ready"))["lastTransitionTime"]
    old = {pod["metadata"]["name"] for pod in here.cluster.pods("decode")}
    here.cluster.troubles = {"decode": "image", "prefill": "image"}
    await here.apply(options={"image": "r/none:2"})
    assert "r/none:2" in await here.is_true("Degraded", "ImagePullFailed")
    for _ in range(20):
        await here.until(lambda: True)
    assert old <= {pod["metadata"]["name"] for pod in here.cluster.pods("decode")}, "the old ones go on"
    ready = await here.condition("Ready")
    assert (ready["status"], ready["lastTransitionTime"]) == ("True", since)


@given_by("site")
async def test_an_evicted_pod_drains_and_is_replaced(here):
    await here.apply()
    await here.serves()
    here.cluster.held = {"decode"}
    (pod, _) = here.cluster.pods("decode")
    await here.evict(pod["metadata"]["name"])
    message = await here.until(lambda: progress_about(here, "EvictionByEvictionAPI"))
    assert f"{pod['metadata']['name']} drains (EvictionByEvictionAPI: Eviction API: evicting)" in message
    assert (await here.condition("Ready"))["status"] == "True"
    assert (await here.condition("Degraded"))["status"] == "False", "a drain is no fault"
    here.cluster.held = set()
    await here.serves()
    assert pod["metadata"]["name"] not in {each["metadata"]["name"] for each in here.cluster.pods("decode")}


async def progress_about(here, text):
    condition = await here.condition("Progressing")
    return condition["message"] if condition["status"] == "True" and text in condition["message"] else ""


@given_by("site")
async def test_many_pods_with_one_problem_are_counted(here):
    here.cluster.troubles["decode"] = "unschedulable"
    await here.apply(roles={"prefill": {"replicas": 1}, "decode": {"replicas": 9}})

    async def all_told():
        condition = await here.condition("Degraded")
        return "and 6 more" in condition["message"]

    await here.until(all_told)


@pytest.mark.parametrize(
    ("part", "change"), [("planner", {"planner": {"max_workers": 4}}), ("picker", {"model": "org/model"})]
)
@given_by("site")
async def test_a_planner_or_a_picker_that_does_not_run_is_said_and_stops_nothing(here, part, change):
    here.cluster.troubles[part] = "image"
    options = {"image": "r/penstock:1"} | ({"gateway": "entry"} if part == "picker" else {})
    await here.apply(options=options, **change)
    assert (await here.is_true("Degraded", "ImagePullFailed")).startswith(f"chat-{part}-")

    async def is_ready():
        return (await here.condition("Ready"))["status"] == "True"

    await here.until(is_ready)
    status = await here.status()
    assert status["workers"] == "3/3"
    assert {each["name"]: each["ready"] for each in status["parts"]}[part] == 0
    here.cluster.troubles.clear()
    await here.serves()
