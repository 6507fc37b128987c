"""A worker that fails is replaced by a process that has imported everything already."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.given_by import given_by

pytestmark = pytest.mark.slow


def spares(site):
    """Give the deployment's processes that wait to be workers."""
    used = set(site.deployment.pids().values())
    children = psutil.Process().children()
    return [c for c in children if c.pid not in used and "penstock.deploy.processes.process" in c.cmdline()]


@given_by("deploy", supervision={"spare_processes": 1}, timeout_s=120)
async def test_a_spare_takes_the_place_of_a_worker_and_another_one_follows(site):
    async def is_spare():
        return len(spares(site)) == 1

    async def is_replaced():
        return site.deployment.pids().get("worker-1", failed) != failed

    async def is_back():
        return (await site.workers()).get("worker-1", {}).get("pid") == site.deployment.pids().get("worker-1")

    failed = site.deployment.pids()["worker-1"]
    await site.until(is_spare)
    (spare,) = spares(site)
    site.kill("worker-1")
    await site.until(is_replaced)
    assert site.deployment.pids()["worker-1"] == spare.pid
    await site.until(is_back)
    assert len((await site.tell("hi", max_tokens=3))[0]) > 0

    await site.until(is_spare)  # another one follows; should it end by itself, the next start does without
    os.kill(spares(site)[0].pid, signal.SIGKILL)
    failed = spare.pid
    site.kill("worker-1")
    await site.until(is_replaced)
    await site.until(is_back)
    await site.until(is_spare)


def has_torch(pid):
    """Whether a process has loaded PyTorch."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.engine
@given_by(
    "deploy", role={"engine": "paged", "kv_blocks": 1024}, supervision={"spare_processes": 1}, timeout_s=240
)
async def test_a_spare_that_becomes_a_worker_of_the_demo_model_has_imported_what_it_needs(site):
    async def has_imported():
        return len(spares(site)) == 1 and has_torch(spares(site)[0].pid)

    async def is_routable():
        worker = (await site.workers()).get("worker-1", {})
        return worker.get("pid") == spare.pid and worker["condition"] == "ready"

    await site.until(has_imported)
    (spare,) = spares(site)
    site.kill("worker-1")
    await site.until(is_routable)
    assert len((await site.tell("What is Penstock?", max_tokens=3))[0]) > 0
