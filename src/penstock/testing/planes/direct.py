"""The conformance suite of direct streams: `Connection.open_direct` and `close_direct`.

A plane that cannot write directly says so by False; then everything comes to the sink.
"""

import asyncio
import json
from collections.abc import Iterable

import msgspec
import pytest

from penstock.core.errors import PenstockError
from penstock.core.ids import RequestId, WorkerId
from penstock.core.native import native
from penstock.core.types.requests import FinishReason
from penstock.core.wire import token_list
from penstock.runtime.config import PlaneConfig
from penstock.runtime.requests.direct_streams import DirectStream
from penstock.seams import DirectClient
from penstock.testing.planes.calls import CallsSuite
from penstock.testing.planes.request_plane import Scene
from penstock.testing.planes.scripted_worker import (
    RANKS,
    RecordingSink,
    scripted_request,
)

_WINDOW_TOKENS = 64
_TOTAL = 20 * _WINDOW_TOKENS
_BUFFER_BYTES = 100
_NAME = RequestId("a")


class _Decimals:
    """Decodes a token to its id and a space."""

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)


class _Client(asyncio.WriteTransport):
    """Keeps the tokens that are written to it, and what a direct stream tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.is_closed = False
        self.unsent_bytes = 0
        self.interrupts: list[bool] = []
        self.changed = asyncio.Event()
        decoder = (
            _Decimals()
            if native is None
            else native.ByteDecoder(native.TokenTable(lambda token_id: b"%d " % token_id))
        )
        self.stream = DirectStream(decoder, b"", b"", is_chunked=False)
        self.client = DirectClient(self, _BUFFER_BYTES, lambda _gap_s: None, self._interrupt)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.tokens += map(int, json.loads(bytes(data)).split())
        self.changed.set()

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def _interrupt(self, is_gone: bool) -> None:  # noqa: FBT001 - as `DirectClient` calls it
        self.interrupts.append(is_gone)
        self.changed.set()

    async def until_changed(self) -> None:
        await self.changed.wait()
        self.changed.clear()


class DirectStreamsSuite(CallsSuite):
    """The contract of request planes and calls, and of the streams that their connections write themselves."""

    def test_a_direct_streams_tokens_come_once_in_order_without_grants_and_the_end_to_the_sink(self) -> None:
        async def scenario(scene: Scene) -> None:
            client = await _opened(scene)
            if client is None:
                return
            last = await scene.sink.finished("a")
            assert scene.connection.close_direct(_NAME) is not None
            assert client.tokens
            assert sorted(client.tokens) == client.tokens
            assert sorted([*client.tokens, *scene.sink.tokens("a")]) == list(range(_TOTAL))
            assert scene.sink.written_tokens == len(client.tokens) == client.stream.tokens
            assert last.finish_reason is FinishReason.LENGTH
            assert scene.connection.close_direct(_NAME) is None, "closed already"

        self.run(scenario, PlaneConfig(window_tokens=_WINDOW_TOKENS))

    def test_what_a_closed_stream_did_not_write_is_given_back_and_the_rest_comes_to_the_sink(self) -> None:
        async def scenario(scene: Scene) -> None:
            client = await _opened(scene)
            if client is None:
                return
            before = len(scene.sink.tokens("a"))
            await client.until_changed()
            taken = scene.connection.close_direct(_NAME)
            assert taken is not None
            assert token_list(taken.written) == client.tokens
            kept = client.tokens + token_list(taken.waiting)
            assert 0 <= taken.ungranted <= len(client.tokens)
            scene.connection.grant(_NAME, _TOTAL)
            await scene.sink.finished("a")
            assert scene.sink.tokens("a")[:before] + kept + scene.sink.tokens("a")[before:] == list(
                range(_TOTAL)
            )
            assert scene.sink.written_tokens == len(client.tokens)

        self.run(scenario, PlaneConfig(window_tokens=_WINDOW_TOKENS))

    def test_a_client_that_is_behind_or_gone_is_told_of(self) -> None:
        async def scenario(scene: Scene) -> None:
            client = await _opened(scene)
            if client is None:
                return
            client.unsent_bytes = _BUFFER_BYTES + 1
            while not client.interrupts:
                await client.until_changed()
            assert client.interrupts[0] is False
            client.is_closed = True
            while True not in client.interrupts:
                await client.until_changed()
            assert scene.connection.close_direct(_NAME) is not None
            scene.connection.abort(_NAME)
            await scene.until_stats(lambda stats: stats.live == 0)

        self.run(scenario, PlaneConfig(window_tokens=_WINDOW_TOKENS))


async def _opened(scene: Scene) -> _Client | None:
    """Open a direct stream beyond a request's first token; None where the plane has none, and all tokens came to the sink."""
    scene.connection.submit(scripted_request("count", request_id="a", max_tokens=_TOTAL))
    await scene.sink.until(lambda: bool(scene.sink.tokens("a")))
    client = _Client()
    scene.connection.grant(_NAME, len(scene.sink.tokens("a")))
    if scene.connection.open_direct(_NAME, client.stream, client.client):
        return client
    assert scene.connection.close_direct(_NAME) is None
    scene.connection.grant(_NAME, _TOTAL)
    await scene.sink.finished("a")
    assert scene.sink.tokens("a") == list(range(_TOTAL))
    return None


class RanksSuite(DirectStreamsSuite):
    """The contract of `RequestPlane` and of direct streams, and that a connection is for one rank of a worker."""

    def test_a_connection_is_for_one_rank(self) -> None:
        async def scenario(scene: Scene) -> None:
            sink = RecordingSink()
            instance = msgspec.structs.replace(
                scene.instance, worker_id=WorkerId(99), rank=3, registered_id=scene.instance.worker_id
            )
            connection = await scene.harness.plane().connect(instance, sink)
            for each, to in ((scene.connection, scene.sink), (connection, sink)):
                each.submit(scripted_request("rank", request_id="a"))
                await to.finished("a")
            assert (scene.sink.tokens("a"), sink.tokens("a")) == ([0], [3])
            assert connection.worker_id == 99
            await connection.close()
            with pytest.raises(PenstockError):
                await scene.harness.plane().connect(msgspec.structs.replace(instance, rank=RANKS), sink)

        self.run(scenario)
