"""Wakes an idle vLLM now and then, since the other workers of a host or an object store do not stop storing blocks."""

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.core.log import get_logger

_EVERY_S = 10.0
"""vLLM's device processes poll for a second after each step: at twice a second an idle worker took 0.68 of a core."""
_ANSWER_S = 1.0


class IdleWakes:
    """Calls vLLM's core every 10 s while it has no requests: it then steps if its connector asks for that, and hears its tiers.

    One event loop owns it.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """Begin without calls; `is_busy`: whether requests are under way."""
        self._is_busy = is_busy
        self._is_waiting = True
        self._calling: asyncio.Task[None] | None = None

    def begin(self, core: Any, *, is_shared: bool) -> None:
        """Begin to call vLLM's AsyncMPClient; nothing if no tier is shared, since then only requests bring blocks."""
        if is_shared:
            self._calling = asyncio.get_running_loop().create_task(self._call(core))

    async def end(self) -> None:
        """Call no more, and wait for the answer of a call under way, for a second at most. Safe twice."""
        calling, self._calling = self._calling, None
        if calling is None:
            return
        if self._is_waiting:
            calling.cancel()
        await asyncio.wait([calling], timeout=_ANSWER_S)
        calling.cancel()

    async def _call(self, core: Any) -> None:
        try:
            while self._calling is not None:
                self._is_waiting = True
                await asyncio.sleep(_EVERY_S)
                self._is_waiting = False
                if not self._is_busy():
                    await core.is_sleeping_async()
        except Exception as error:  # noqa: BLE001 - `steps` raises if vLLM has died
            get_logger().debug("vllm_not_woken", error=repr(error))
