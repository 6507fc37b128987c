"""Streams that run while a registry fails, and what a frontend says of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

PROMPT = "Tell me what a penstock is"
TOKENS = 600
STREAMS = 4


@asynccontextmanager
async def streams(site: Any, undisturbed: str) -> AsyncIterator[None]:
    """Have streams under way in the block, and compare each one's text at its end."""
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(site.tell(PROMPT, max_tokens=TOKENS)) for _ in range(STREAMS)]

        async def all_run() -> bool:
            loads = [await site.load(name) for name in await site.workers()]
            return bool(sum(load.get("running_requests", 0) for load in loads) == STREAMS)

        await site.until(all_run)
        yield
    for task in running:
        text, usage = task.result()
        assert text == undisturbed
        assert usage.completion_tokens == TOKENS


async def registry_is_connected(site: Any) -> bool:
    async with site.http.get(f"{site.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return "penstock_runtime_registry_connected 1.0" in lines


async def registry_is_lost(site: Any) -> bool:
    return not await registry_is_connected(site)


async def ready_ids(site: Any) -> set[int]:
    workers = (await site.workers()).values()
    return {worker["worker_id"] for worker in workers if worker["condition"] == "ready"}
