import asyncio
import contextlib

import pytest

from penstock.sim.loop import Deadlock, SimLoop, run, run_virtual


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
