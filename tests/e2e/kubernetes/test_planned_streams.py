"""A planner's pod as a process: it adds pods under load, and ends the least loaded ones without it, also after it was killed."""

import pytest

from penstock.deploy.hosts.roles import ROLES
from tests.e2e.kubernetes.test_streams import PROMPTS, deployed, streaming
from tests.support.coroutines import given_by

pytestmark = pytest.mark.slow
PLANNER = {
    "max_workers": 3, "react_period_s": 0.5, "floor_period_s": 2, "cool_down_s": 3, "cold_s": 1,
}  # fmt: skip
ROLE = {"engine": "mock", "replicas": 1, "max_running_requests": 2, "mock": {"speedup": 0.5}}


@given_by("site", operator=False, timeout_s=300)
async def test_a_planners_pod_scales_its_role_out_and_in_and_loses_no_stream(here, tmp_path):
    async def wanted(count):
        spec = (await here.client.get(ROLES, "chat-aggregated"))["spec"]
        return spec["replicas"] == count and len(here.cluster.pods("aggregated")) == count

    async def replaced(uid):
        return {pod["metadata"]["uid"] for pod in here.cluster.pods("planner")} - {uid}

    graph = {"roles": {"aggregated": ROLE}, "planner": PLANNER, "slo": {"ttft_s": 0.2, "itl_s": 0.1}}
    async with deployed(here, tmp_path, **graph) as service:
        async with streaming(here, service) as load:
            await here.until(lambda: wanted(3))
            await load.more(len(PROMPTS))
            (planner,) = here.cluster.pods("planner")
            await here.evict(planner["metadata"]["name"])
            await here.until(lambda: replaced(planner["metadata"]["uid"]))
        await here.until(lambda: wanted(1))
        spec = (await here.client.get(ROLES, "chat-aggregated"))["spec"]
        assert spec["leaving"], "the planner chose which end"
        await here.serves()
