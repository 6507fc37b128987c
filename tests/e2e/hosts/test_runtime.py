"""`runtime` of a graph over real processes: workers behind TCP and TLS, secrets that are missing."""

import asyncio

import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.secret import SECRET_VARIABLE
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.graph import Graph
from tests.support.certificates import make_authority, make_certificate

pytestmark = pytest.mark.slow


@pytest.mark.needs("openssl")
def test_streams_of_prefill_and_decode_workers_go_by_tls(deploy, tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the test")
    certificate = make_certificate(tmp_path, "host", make_authority(tmp_path, "authority"))

    async def scenario(site):
        text, usage = await site.tell("tell me about pipes", max_tokens=20)
        assert text
        assert usage.completion_tokens == 20
        workers = await site.workers()
        assert len({worker["worker_id"] for worker in workers.values()}) == 2
        assert all(worker["address"].startswith("tcp://127.0.0.1:") for worker in workers.values())

    role = {"engine": "mock", "replicas": 1}
    runtime = {"listen": "tcp://127.0.0.1:0", "tls": certificate.model_dump()}
    deploy(scenario, role=None, roles={"prefill": role, "decode": role}, runtime=runtime)


def test_without_a_secret_no_worker_listens_for_others(runtime_dir, monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    roles = {"aggregated": {"engine": "mock"}}
    graph = Graph.model_validate(
        {"model": "demo", "roles": roles, "runtime": {"listen": "tcp://0.0.0.0:0"}, "frontend": {"port": 0}}
    )

    async def enter():
        async with LocalDeployment(graph):
            pass

    with pytest.raises(ConfigError, match="no secret is given"):
        asyncio.run(enter())
