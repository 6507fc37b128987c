"""How long a stream waits for its client."""

import asyncio
from types import SimpleNamespace

import pytest

from penstock.core.errors import DeadlineExceeded
from penstock.frontend.config import FrontendConfig
from penstock.frontend.http import sse_response
from penstock.frontend.http.replies import request_id
from penstock.frontend.http.sse_response import SseResponse
from penstock.sim.loop.loop import run_virtual


class Client:
    """Takes a byte a second for a while; what it was sent never has room."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def left(self) -> int:
        return 10_000 - int(min(asyncio.get_running_loop().time(), self.seconds))

    async def drain(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(("seconds", "cut_s"), [(0.0, 2.0), (99.5, 102.0)])
def test_who_takes_a_little_now_and_then_is_waited_for_and_who_takes_nothing_is_not(
    monkeypatch: pytest.MonkeyPatch, seconds: float, cut_s: float
) -> None:
    client = Client(seconds)
    pending = SimpleNamespace(event_stream=lambda: None)
    heads = SimpleNamespace(of=lambda *_: None)

    async def main() -> None:
        config = FrontendConfig(write_buffer_bytes=4096, reader_timeout_s=2.0)
        full = SimpleNamespace(get_write_buffer_size=lambda: 4097)
        request_id.set("abc")
        response = SseResponse(SimpleNamespace(transport=full), pending, config, heads)
        monkeypatch.setattr(sse_response, "unsent_bytes", lambda _: client.left())
        response._writer = client
        with pytest.raises(DeadlineExceeded, match=r"took nothing of its stream for 2 s"):
            await response._drain()
        assert asyncio.get_running_loop().time() == pytest.approx(cut_s, abs=2.1)

    run_virtual(main())
