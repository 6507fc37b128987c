"""Slots for requests under way, and their time."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from penstock.core.errors import DeadlineExceeded, Overloaded, Unavailable
from penstock.frontend.errors import ReceiveTimeoutError
from penstock.frontend.limits.admission import Admission, Slot


def admission_of(inflight_max: int, request_timeout_s: float, receive_timeout_s: float = 60) -> Admission:
    return Admission(
        inflight_max=inflight_max,
        request_timeout_s=request_timeout_s,
        receive_timeout_s=receive_timeout_s,
        retry_after_s=lambda: 40.0,
    )


@contextlib.contextmanager
def admitted(admission: Admission) -> Iterator[Slot]:
    with admission.arrive() as slot:
        admission.admit(slot)
        yield slot


def test_more_than_allowed_is_refused_until_one_leaves() -> None:
    async def main() -> None:
        admission = admission_of(1, 60)
        with admitted(admission):
            with pytest.raises(Overloaded, match="1 requests are under way") as caught, admitted(admission):
                pass
            assert caught.value.http_status == 503
            assert caught.value.retry_after_s
        with admitted(admission):
            assert admission.inflight == 1
        assert admission.inflight == 0

    asyncio.run(main())


def test_those_that_arrive_take_no_place_and_have_less_time() -> None:
    async def main() -> None:
        admission = admission_of(1, 60, 0.001)
        with admission.arrive() as slow, admitted(admission) as fast:
            assert admission.inflight == 1
            assert fast.deadline > slow.deadline + 30
            with pytest.raises(ReceiveTimeoutError, match=r"0\.001 s after the headers"), slow.limit():
                await asyncio.sleep(3600)
            with pytest.raises(Overloaded):
                admission.admit(slow)
        assert admission.inflight == 0

    asyncio.run(main())


def test_time_is_up() -> None:
    async def main() -> None:
        admission = admission_of(1, 0.001)
        late = pytest.raises(DeadlineExceeded, match=r"longer than 0\.001 s")
        with admitted(admission) as slot, late, slot.limit():
            await asyncio.sleep(3600)

    asyncio.run(main())


def test_a_timeout_of_something_inside_stays_what_it_is() -> None:
    async def main() -> None:
        admission = admission_of(1, 60)
        with admitted(admission) as slot, pytest.raises(TimeoutError), slot.limit():
            raise TimeoutError

    asyncio.run(main())


def test_a_cancelled_task_is_not_late() -> None:
    async def main() -> None:
        admission = admission_of(1, 60)

        async def request() -> None:
            with admitted(admission) as slot, slot.limit():
                await asyncio.sleep(3600)

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert admission.inflight == 0

    asyncio.run(main())


def test_the_deadline_moves_both_ways_while_the_request_runs() -> None:
    async def main() -> None:
        admission = admission_of(1, 60, 0.005)
        reached = []

        async def request() -> None:
            with admission.arrive() as slot, slot.limit():
                admission.admit(slot)
                await asyncio.sleep(0.02)
                reached.append("past the time for the body, which is there")
                slot.move_deadline(asyncio.get_running_loop().time() + 0.001)
                await asyncio.sleep(3600)

        with pytest.raises(DeadlineExceeded):
            await request()
        assert len(reached) == 1

    asyncio.run(main())


def test_draining_waits_for_the_last_one() -> None:
    async def main() -> None:
        admission = admission_of(2, 60)

        async def request() -> None:
            with admitted(admission) as slot, slot.limit():
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            group.create_task(request())
            await asyncio.sleep(0)
            assert await admission.drain(60) == 0
        assert admission.inflight == 0

    asyncio.run(main())


def test_draining_ends_what_takes_too_long() -> None:
    async def main() -> None:
        admission = admission_of(2, 60)
        errors: list[Exception] = []

        async def request(*, limited: bool) -> None:
            with admitted(admission) as slot:
                if not limited:
                    await started.wait()  # between two limits when the end comes
                try:
                    with slot.limit():
                        await asyncio.sleep(3600)
                except Unavailable as error:
                    errors.append(error)

        started = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(request(limited=True))
            group.create_task(request(limited=False))
            await asyncio.sleep(0)
            assert await admission.drain(0.001) == 2
            started.set()
        assert [str(error) for error in errors] == ["the server is shutting down; try again"] * 2

    asyncio.run(main())


def test_a_drain_can_be_hurried() -> None:
    async def main() -> None:
        admission = admission_of(1, 60)
        admission.hurry()  # nothing drains: nothing happens

        async def request() -> None:
            with admitted(admission) as slot, contextlib.suppress(Unavailable), slot.limit():
                await asyncio.sleep(3600)

        async with asyncio.TaskGroup() as group:
            group.create_task(request())
            await asyncio.sleep(0)
            draining = group.create_task(admission.drain(3600))
            await asyncio.sleep(0)
            admission.hurry()
            admission.hurry()
            assert await draining == 1
        assert admission.inflight == 0

    asyncio.run(main())
