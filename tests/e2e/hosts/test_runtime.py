"""`runtime` of a graph over real processes: workers behind TCP and TLS, secrets that are missing."""

import asyncio

import pytest

from penstock.cli import main
from penstock.core.errors import ConfigError
from penstock.deploy.identity import SECRET_VARIABLE
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.graph import Graph
from tests.support.certificates import make_authority, make_certificate
from tests.support.registries import free_port
from tests.support.up import Up

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


def test_what_a_host_cannot_do_is_said_before_anything_starts(runtime_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the test")
    graph = Up(tmp_path, runtime_dir).graph(runtime={"hub": f"tcp://127.0.0.1:{free_port()}"})
    for arguments, host, said in (
        ((), "a@b", "PENSTOCK_HOST: must be a printable name"),
        (("--set", "runtime.advertise=nobody.invalid"), "a", "runtime.advertise: 'nobody.invalid' cannot be resolved here: "),
        (("--run", "aggregated=99999"), "a", "99,999 workers here, but a router knows at most 1,024"),
    ):  # fmt: skip
        monkeypatch.setenv("PENSTOCK_HOST", host)
        assert main(["up", str(graph), *arguments]) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert "worker-1" not in printed.out
