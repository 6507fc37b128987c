"""The API server on a thread with an event loop of its own, for processes under test while the test's loop is busy elsewhere."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self, TypeVar

from tests.support.kubernetes.api_server import ApiServer

T = TypeVar("T")
_CALL_S = 30.0


class ApiServerThread:
    """Start in `with`; `call` runs something on its loop."""

    def __init__(self) -> None:
        self.server = ApiServer()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self.server.start)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.resume()
        self.call(self.server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CALL_S)

    def do(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self.call(run)

    def write_config(self, path: Path) -> Path:
        """Write a kubeconfig for it."""
        (token, *_) = self.server.tokens
        return write_config(self.server.url, path, token=token)


def write_config(url: str, path: Path, *, token: str = "suite-token") -> Path:
    """Write a kubeconfig for an API server."""
    config = {
        "current-context": "suite",
        "contexts": [{"name": "suite", "context": {"cluster": "suite", "user": "suite"}}],
        "clusters": [{"name": "suite", "cluster": {"server": url}}],
        "users": [{"name": "suite", "user": {"token": token}}],
    }
    path.write_text(json.dumps(config))
    return path
