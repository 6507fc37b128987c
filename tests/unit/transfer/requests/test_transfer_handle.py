"""Waiting for a transfer, and being interrupted at it."""

import asyncio

import pytest

from penstock.core.errors import TransferCancelled
from penstock.transfer.requests.handle import Telemetry, TransferHandle


@pytest.mark.virtual
async def test_who_is_cancelled_twice_still_waits_until_memory_is_free():
    handle = TransferHandle(Telemetry(num_bytes=1, ranges=1, backend="memory"))
    asked = []
    handle.cancels_by(lambda: asked.append("cancel"))
    task = asyncio.ensure_future(handle.complete())
    for _ in range(3):
        await asyncio.sleep(0.1)
        task.cancel()
    await asyncio.sleep(0.1)
    assert asked == ["cancel"]
    assert not task.done(), "its bytes may still arrive"
    handle.finish(TransferCancelled("it has ended"))
    with pytest.raises(asyncio.CancelledError):
        await task
