"""Thousands of mutated messages to the supervisor's control socket: each gets a reason or nothing, and the deployment goes on."""

import asyncio
import random
import tempfile
from pathlib import Path

import msgspec
import pytest

from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME, Deployment, Told
from penstock.deploy.control.server import ControlServer
from penstock.planner.act import memory_connector
from penstock.planner.act.memory_connector import MemoryConnector
from penstock.planner.act.worker_changes import TimedChanges
from penstock.planner.observe.stream import ObservationStream
from penstock.runtime.observations.windows import RequestWindow
from tests.support.control_mutations import answer_to, mutated

MESSAGES = 2_000
CALLERS = 32
WORKERS_MAX = 64


@pytest.mark.parametrize("seed", [0])
async def test_mutated_messages_harm_nobody(seed, monkeypatch):
    monkeypatch.setattr(memory_connector, "_WAIT_S_MAX", 0.01)  # callers that wait for a change
    rng = random.Random(seed)
    messages = iter([mutated(rng) for _ in range(MESSAGES)])
    refused = answered = 0

    async def call(path):
        nonlocal refused, answered
        for message in messages:
            answer = await answer_to(path, message)
            told = msgspec.json.decode(answer, type=Told)
            answered += 1
            refused += told.error is not None
            assert told.error is None or "failed at this request" not in told.error.message, (message, told)
            assert len(answer) < 1 << 16

    connector = MemoryConnector(
        {Role.PREFILL: 2, Role.DECODE: 2},
        workers_max=WORKERS_MAX,
        changes=TimedChanges(starts_s=0.01, drains_s=0.01, flips_s=0.01),
    )
    stream = ObservationStream()
    stream.put("frontend-1", RequestWindow(seconds=1.0, arrivals=3))
    with tempfile.TemporaryDirectory() as directory:
        me = Deployment(name="fuzz", url="http://127.0.0.1:1", pid=1)
        async with ControlServer(connector, stream, Path(directory), me):
            path = Path(directory, SOCKET_NAME)
            await asyncio.gather(*(call(path) for _ in range(CALLERS)))
            scale = await LocalConnector(path).scale()
    assert 2 <= len(scale.replicas) <= WORKERS_MAX
    assert any(each.role is Role.DECODE for each in scale.replicas)
    assert answered == MESSAGES
    assert refused > MESSAGES / 2, "most are no requests"
