"""The example of an autoscaler: what Kubernetes takes, and what it does with a role."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from penstock.deploy.operator.definitions import ROLES
from penstock.runtime.kubernetes.client import Resource
from tests.support.coroutines import given_by

pytestmark = pytest.mark.slow
AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
ROOT = Path(__file__).parents[3]
BODY = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "autoscaler.yaml").read_text())
((METRIC,),) = ([each["external"]["metric"]["name"]] for each in BODY["spec"]["metrics"])


def test_the_example_is_valid_and_its_metric_is_one_of_ours():
    kubernetes_validate.validate(BODY, "1.37", strict=True)
    target = BODY["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (ROLES.api_version, ROLES.kind)
    assert f"`{METRIC}`" in (ROOT / "docs" / "metrics.md").read_text()


@given_by("site")
async def test_an_autoscaler_follows_the_load_within_its_bounds(here):
    await here.apply()
    await here.serves()
    await here.client.create(AUTOSCALERS, BODY)
    for requests, workers in ((200.0, 7), (210.0, 7), (1000.0, 8), (40.0, 2), (0.0, 1)):
        here.cluster.metrics = {METRIC: requests}
        await here.until(lambda workers=workers: len(here.cluster.pods("decode")) == workers)
        await here.serves()
    await here.apply(roles={"prefill": {"replicas": 1}, "decode": {"replicas": 5}})
    await here.serves()
    assert len(here.cluster.pods("decode")) == 1, "the graph yields"
    parts = {part["name"]: part["scaledBy"] for part in (await here.status())["parts"]}
    assert parts == {"frontend": "", "prefill": "", "decode": "chat-decode"}
