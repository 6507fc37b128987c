"""Changes of a connector in memory that somebody else makes."""

import asyncio

import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.core.types.scaling import ReplicaState
from penstock.planner.act.memory_connector import MemoryConnector
from penstock.planner.act.worker_changes import TimedChanges
from tests.support.virtual_time import virtual

P, D = Role.PREFILL, Role.DECODE


class Refusing(TimedChanges):
    """Workers that refuse another role after a second."""

    def flip(self, name, role, done):
        asyncio.get_running_loop().call_later(1.0, done, RequestError(f"{name}: no", http_status=409))


@virtual
async def test_a_flip_that_a_worker_refuses_leaves_its_role():
    connector = MemoryConnector({P: 1, D: 2}, changes=Refusing())
    with pytest.raises(RequestError, match="decode-1: no"):
        await connector.flip("decode-1", P, by="me")
    worker = next(each for each in connector.workers if each.name == "decode-1")
    assert (worker.role, worker.state) == (D, ReplicaState.READY)
    assert (await connector.scale()).revision == 1, "it was accepted"


@virtual
async def test_a_worker_that_drains_while_it_flips_is_gone_and_its_caller_hears_of_it():
    connector = MemoryConnector({P: 1, D: 2}, changes=TimedChanges(drains_s=5.0, flips_s=1.0))
    flip = asyncio.get_running_loop().create_task(connector.flip("decode-1", P, by="me"))
    await asyncio.sleep(0.5)
    await connector.retire(["decode-1"], by="me")
    with pytest.raises(Unavailable, match="has ended while it became prefill"):
        await flip
    await asyncio.sleep(5.0)
    assert [each.name for each in connector.workers] == ["prefill-1", "decode-2"]
