"""Changes of a connector in memory that somebody else makes, and waits of roles whose starts fail."""

import asyncio

import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.core.types.scaling import ReplicaState
from penstock.planner.act.memory_connector import MemoryConnector
from penstock.planner.act.start_backoff import StartBackoff
from penstock.planner.act.worker_changes import TimedChanges

P, D = Role.PREFILL, Role.DECODE


class Refusing(TimedChanges):
    """Workers that refuse another role after a second."""

    def flip(self, name, role, done):
        asyncio.get_running_loop().call_later(1.0, done, RequestError(f"{name}: no", http_status=409))


@pytest.mark.virtual
async def test_a_flip_that_a_worker_refuses_leaves_its_role():
    connector = MemoryConnector({P: 1, D: 2}, changes=Refusing())
    with pytest.raises(RequestError, match="decode-1: no"):
        await connector.flip("decode-1", P, by="me")
    worker = next(each for each in connector.workers if each.name == "decode-1")
    assert (worker.role, worker.state) == (D, ReplicaState.READY)
    assert (await connector.scale()).revision == 1, "it was accepted"


@pytest.mark.virtual
async def test_a_worker_that_drains_while_it_flips_is_gone_and_its_caller_hears_of_it():
    connector = MemoryConnector({P: 1, D: 2}, changes=TimedChanges(drains_s=5.0, flips_s=1.0))
    flip = asyncio.get_running_loop().create_task(connector.flip("decode-1", P, by="me"))
    await asyncio.sleep(0.5)
    await connector.retire(["decode-1"], by="me")
    with pytest.raises(Unavailable, match="has ended while it became prefill"):
        await flip
    await asyncio.sleep(5.0)
    assert [each.name for each in connector.workers] == ["prefill-1", "decode-2"]


A, D = Role.AGGREGATED, Role.DECODE


def fail(backoff, at_s, *, begun_s=None, role=A):
    backoff.note_failure(role, begun_s=at_s if begun_s is None else begun_s, now_s=at_s, deadline_s=60)
    return backoff.wait_s(role, at_s)


def test_starts_that_began_together_are_one_failure():
    backoff = StartBackoff(wait_s_max=400)
    fail(backoff, 60, begun_s=0)
    fail(backoff, 65, begun_s=5)
    fail(backoff, 70, begun_s=0)
    assert backoff.failures(A) == 1
    assert fail(backoff, 140, begun_s=61) == 60


def test_a_success_after_the_last_failure_of_a_role_ends_its_wait():
    backoff = StartBackoff(wait_s_max=400)
    fail(backoff, 60)
    assert fail(backoff, 200) == 60
    assert backoff.wait_s(D, 200) == 0, "roles wait for themselves"
    backoff.note_success(A, ready_at_s=150)
    backoff.note_success(D, ready_at_s=300)
    assert backoff.failures(A) == 2, "it was ready before"
    backoff.note_success(A, ready_at_s=201)
    assert (backoff.failures(A), backoff.wait_s(A, 202)) == (0, 0)
