"""The virtual clock itself."""

import asyncio
import time

import pytest

from penstock.testing.sim_loop import DeadlockError, run_sim


def test_an_hour_passes_at_once_and_in_order():
    async def main() -> list[tuple[float, str]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, str]] = []

        async def wait(delay_s: float, name: str) -> None:
            await asyncio.sleep(delay_s)
            seen.append((loop.time(), name))

        async with asyncio.TaskGroup() as group:
            group.create_task(wait(3600.0, "late"))
            group.create_task(wait(0.5, "early"))
        return seen

    started = time.perf_counter()
    assert run_sim(main()) == [(0.5, "early"), (3600.0, "late")]
    assert time.perf_counter() - started < 5


def test_timeouts_use_the_virtual_clock():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_sim(main()) == pytest.approx(10)


def test_executor_runs_inline():
    async def main() -> str:
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 / 0)
        return await asyncio.to_thread(str.upper, "here")

    assert run_sim(main()) == "HERE"


def test_a_deadlock_is_an_error_and_no_hang():
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match="nothing can run"):
        run_sim(main())
