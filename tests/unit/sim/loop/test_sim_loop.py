import asyncio
import contextlib

import pytest

from penstock.sim.loop.loop import Deadlock, SimLoop, run, run_virtual


def test_hours_of_sleeping_take_no_time():
    async def main() -> float:
        async with asyncio.timeout(100_000):
            await asyncio.sleep(86_400 * 3 / 4)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 64_800.0


def test_timeouts_fire_at_their_moment():
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        at = []
        for timeout_s in (0.0, 1e-6, 0.5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.Event().wait()
            at.append(loop.time())
        return at

    assert run_virtual(main()) == [0.0, 1e-6, 0.500001]


def test_a_deadlock_is_an_error_that_names_those_who_wait():
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_ever(), name="the hopeless one")

    with pytest.raises(Deadlock, match=r"at 0 s:\n(.|\n)*the hopeless one: locks.py:\d+ in Event.wait"):
        run_virtual(main())


def test_the_seed_decides():
    async def main(rng) -> float:
        await asyncio.sleep(rng.random())
        return asyncio.get_running_loop().time()

    assert run(main, 1) == run(main, 1) != run(main, 2)


def test_executors_run_on_the_spot():
    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        got: list[object] = [await asyncio.to_thread(lambda: 41 + 1)]
        try:
            await loop.run_in_executor(None, int, "x")
        except ValueError as error:
            got.append(type(error))
        return got

    assert run_virtual(main()) == [42, ValueError]


def test_a_group_cancels_its_tasks_in_the_order_in_which_they_began():
    """A group keeps them in a set, whose order is else that of addresses."""

    async def main() -> list[int]:
        ended: list[int] = []

        async def member(number: int) -> None:
            try:
                await asyncio.sleep(9)
            finally:
                ended.append(number)

        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(member(number))
                await asyncio.sleep(4)
                raise ValueError
        return ended

    assert run_virtual(main()) == list(range(50))


def test_timers_of_one_moment_run_in_the_order_they_were_set_and_cancelled_ones_never():
    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        got: list[object] = []
        handles = [loop.call_at(2.0 if n % 3 else 1.0, got.append, n) for n in range(12)]
        handles[4].cancel()
        loop.call_soon(handles[6].cancel)
        handles.append(loop.call_soon(got.append, "soon"))
        handles[-1].cancel()
        await asyncio.sleep(5)
        handles[0].cancel()  # it has run: no error
        return got

    assert run_virtual(main()) == [0, 3, 9, 1, 2, 5, 7, 8, 10, 11]


def test_cancelled_timers_are_forgotten_before_their_moment():
    async def main() -> int:
        loop = asyncio.get_running_loop()
        most = 0
        for _ in range(50):
            for _ in range(100):
                loop.call_later(1e6, print).cancel()
            await asyncio.sleep(0.01)
            most = max(most, loop.num_timers)
        assert loop.cancelled_timers <= loop.num_timers
        return most

    assert run_virtual(main()) < 300
