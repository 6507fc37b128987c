"""Slots for requests under way, and their time."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from penstock.core.errors import DeadlineExceeded, Overloaded, Unavailable
from penstock.frontend.errors import ReceiveTimeoutError
from penstock.frontend.limits.admission import Admission, Slot

pytestmark = pytest.mark.virtual


def admission_of(inflight_max: int, *, receive_timeout_s: float = 60) -> Admission:
    return Admission(
        inflight_max=inflight_max,
        request_timeout_s=600,
        receive_timeout_s=receive_timeout_s,
        retry_after_s=lambda: 40.0,
    )


@contextlib.contextmanager
def admitted(admission: Admission) -> Iterator[Slot]:
    with admission.arrive() as slot:
        admission.admit(slot)
        yield slot


async def test_more_than_allowed_is_refused_until_one_leaves() -> None:
    admission = admission_of(1)
    with admitted(admission):
        with pytest.raises(Overloaded, match="1 requests are under way") as caught, admitted(admission):
            pass
        assert (caught.value.http_status, caught.value.retry_after_s) == (503, 40.0)
    with admitted(admission):
        assert admission.inflight == 1
    assert admission.inflight == 0


async def test_those_that_arrive_take_no_place_and_have_less_time() -> None:
    admission = admission_of(1)
    with admission.arrive() as slow, admitted(admission) as fast:
        assert admission.inflight == 1
        assert fast.deadline == slow.deadline + 540
        with pytest.raises(ReceiveTimeoutError, match=r"60 s after the headers"), slow.limit():
            await asyncio.sleep(3600)
        with pytest.raises(Overloaded):
            admission.admit(slow)
    assert admission.inflight == 0


async def test_time_is_up_but_a_timeout_of_something_inside_stays_what_it_is() -> None:
    admission = admission_of(1)
    late = pytest.raises(DeadlineExceeded, match="longer than 600 s")
    with admitted(admission) as slot, late, slot.limit():
        await asyncio.sleep(3600)
    with admitted(admission) as slot, pytest.raises(TimeoutError), slot.limit():
        raise TimeoutError


async def test_a_cancelled_task_is_not_late() -> None:
    admission = admission_of(1)

    async def request() -> None:
        with admitted(admission) as slot, slot.limit():
            await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(request(), 1)
    assert admission.inflight == 0


async def test_the_deadline_moves_both_ways_while_the_request_runs() -> None:
    loop = asyncio.get_running_loop()
    admission = admission_of(1)

    async def request() -> None:
        with admission.arrive() as slot, slot.limit():
            admission.admit(slot)
            await asyncio.sleep(70)  # past the time for the body, which is there
            slot.move_deadline(loop.time() + 5)
            await asyncio.sleep(3600)

    with pytest.raises(DeadlineExceeded):
        await request()
    assert loop.time() == pytest.approx(75)


@pytest.mark.parametrize("ends", ["in time", "late", "hurried"])
async def test_draining_waits_and_ends_what_takes_too_long(ends: str) -> None:
    admission = admission_of(2)
    admission.hurry()  # nothing drains: nothing happens
    errors: list[str] = []
    drained = asyncio.Event()

    async def request(*, limited: bool) -> None:
        with admitted(admission) as slot:
            if not limited:
                await drained.wait()  # between two limits when the end comes
            try:
                with slot.limit():
                    await asyncio.sleep(3600 if ends == "hurried" else 20)
            except Unavailable as error:
                errors.append(str(error))

    async with asyncio.TaskGroup() as group:
        group.create_task(request(limited=True))
        if ends != "in time":
            group.create_task(request(limited=False))
        await asyncio.sleep(0)
        draining = group.create_task(admission.drain({"in time": 60, "late": 10, "hurried": 7200}[ends]))
        await asyncio.sleep(0)
        if ends == "hurried":
            admission.hurry()
            admission.hurry()
        assert await draining == (0 if ends == "in time" else 2)
        drained.set()
    assert errors == ([] if ends == "in time" else ["the server is shutting down; try again"] * 2)
    assert admission.inflight == 0
