"""The conformance suite of request planes. Subclass it and name a harness.

    class TestTcpPlane(RequestPlaneSuite):
        harness = TcpPlaneHarness

For your own plane, write a `PlaneHarness`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Self

import msgspec
import pytest

from penstock.core.errors import (
    Overloaded,
    Parked,
    ProtocolError,
    RequestError,
    WorkerLost,
    from_info,
)
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.kv import KvAccess
from penstock.core.types.requests import FinishReason, Prefetch, TokenLogprob
from penstock.core.wire import num_tokens
from penstock.runtime.config import EventConfig, PlaneConfig
from penstock.seams import Connection
from penstock.testing.loop import run_async
from penstock.testing.planes.harness import PlaneHarness
from penstock.testing.planes.scripted_worker import (
    EMPTY_SHA256,
    FILE,
    FILE_SHA256,
    WRONG_SHA256,
    RecordingSink,
    WorkerStats,
    scripted_request,
)

_GROWTH_KIB_MAX = 8 * 1024
_WINDOW_TOKENS = 64
_MANY_TOKENS = 3_000_000  # far more than a worker may buffer for a reader that grants nothing

HarnessFactory = Callable[[PlaneConfig | None, EventConfig | None], PlaneHarness]


class Scene:
    """A worker with one connected frontend."""

    def __init__(self, harness: PlaneHarness) -> None:
        """Use the harness's first worker."""
        self.harness = harness
        self.sink = RecordingSink()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.harness)
        self.instance = await self.harness.start_worker()
        self.connection = await self.connect(self.sink)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def connect(self, sink: RecordingSink) -> Connection:
        connection = await self.harness.plane().connect(self.instance, sink)
        self._stack.push_async_callback(connection.close)
        return connection

    async def stats(self) -> WorkerStats:
        """Get the worker's statistics over a separate connection."""
        sink = RecordingSink()
        connection = await self.harness.plane().connect(self.instance, sink)
        connection.submit(scripted_request("stats", request_id="stats"))
        await sink.finished("stats")
        await connection.close()
        return WorkerStats(*sink.tokens("stats"))

    async def until_stats(self, condition: Callable[[WorkerStats], bool]) -> WorkerStats:
        while True:  # each question is a turn of the worker: no need to wait in between
            stats = await self.stats()
            if condition(stats):
                return stats


class RequestPlaneSuite:
    """The contract of `RequestPlane`, `Connection`, `FrontendSink` and `WorkerSink`."""

    harness: ClassVar[HarnessFactory]
    loop_factory: ClassVar[Callable[[], asyncio.AbstractEventLoop]] = asyncio.new_event_loop
    """The frontend's event loop."""

    def run(self, scenario: Callable[[Scene], Awaitable[None]], config: PlaneConfig | None = None) -> None:
        async def main() -> None:
            async with Scene(type(self).harness(config, None)) as scene:
                await scenario(scene)

        run_async(main(), loop_factory=type(self).loop_factory)

    def test_tokens_arrive_once_and_in_order(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.connection.submit(scripted_request("echo", [5, 6, 7], request_id="a"))
            last = await scene.sink.finished("a")
            assert scene.sink.tokens("a") == [5, 6, 7]
            assert last.finish_reason is FinishReason.STOP
            assert [d.finish_reason for d in scene.sink.deltas["a"]].count(None) == len(
                scene.sink.deltas["a"]
            ) - 1

        self.run(scenario)

    def test_requests_share_a_connection_and_a_step_is_one_frame(self) -> None:
        async def scenario(scene: Scene) -> None:
            prompts = {f"r{i}": [1000 * i + j for j in range(20)] for i in range(50)}
            for request_id, prompt in prompts.items():
                scene.connection.submit(scripted_request("echo", prompt, request_id=request_id))
            for request_id, prompt in prompts.items():
                await scene.sink.finished(request_id)
                assert scene.sink.tokens(request_id) == prompt
            assert max(scene.sink.frame_sizes) > 1

        self.run(scenario)

    def test_every_field_of_a_delta_arrives(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.connection.submit(scripted_request("fields", request_id="a"))
            last = await scene.sink.finished("a")
            assert last.cached_tokens == 32
            assert last.logprobs[0] == TokenLogprob(token_id=7, logprob=-0.5, top=((7, -0.5), (9, -1.5)))

        self.run(scenario)

    def test_a_refusal_comes_as_a_delta(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.connection.submit(scripted_request("refuse", request_id="a"))
            last = await scene.sink.finished("a")
            assert last.error is not None
            error = from_info(last.error)
            assert isinstance(error, Overloaded)
            assert error.retry_after_s == 2.5

        self.run(scenario)

    def test_a_request_that_cannot_be_encoded_is_refused(self) -> None:
        async def scenario(scene: Scene) -> None:
            odd: tuple[dict[str, Any], ...] = ({"choice": 1 << 64}, {"model": "\ud800"})
            for fields in odd:
                request = msgspec.structs.replace(scripted_request("echo", [1]), **fields)
                with pytest.raises(RequestError, match="cannot be sent"):
                    scene.connection.submit(request)

        self.run(scenario)

    def test_the_deadline_travels_as_remaining_time(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.connection.submit(scripted_request("deadline", request_id="a", deadline_s=20.0))
            await scene.sink.finished("a")
            assert 0 < scene.sink.tokens("a")[0] <= 20_000

        self.run(scenario)

    def test_a_call_never_reenters_its_caller(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.connection.submit(scripted_request("echo", [1], request_id="a"))
            scene.connection.subscribe(None)
            scene.connection.abort(RequestId("a"))
            assert not scene.sink.deltas
            assert not scene.sink.events

        self.run(scenario)

    def test_a_new_frontend_gets_a_load_report_at_once(self) -> None:
        async def scenario(scene: Scene) -> None:
            await scene.sink.until(lambda: bool(scene.sink.loads))
            scene.connection.submit(scripted_request("silence", request_id="a"))
            await scene.sink.until(lambda: scene.sink.loads[-1].running_requests == 1)

        self.run(scenario)

    def test_abort_reaches_the_worker(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.connection.submit(scripted_request("count", request_id="a", max_tokens=10**6))
            await scene.sink.until(lambda: bool(scene.sink.deltas))
            scene.connection.abort(RequestId("a"))
            scene.connection.abort(RequestId("unknown"))
            await scene.until_stats(lambda stats: stats.aborted == 1 and stats.live == 0)
            seen = len(scene.sink.deltas["a"])
            scene.connection.submit(scripted_request("echo", [1], request_id="b"))
            await scene.sink.finished("b")
            assert len(scene.sink.deltas["a"]) == seen, "nothing follows once the worker has the abort"

        self.run(scenario)

    def test_a_frontend_aborts_no_request_of_another(self) -> None:
        async def scenario(scene: Scene) -> None:
            other = await scene.connect(RecordingSink())
            scene.connection.submit(scripted_request("silence", request_id="a"))
            await scene.until_stats(lambda stats: stats.live == 1)
            other.abort(RequestId("a"))
            other.submit(scripted_request("silence", request_id="b"))
            await scene.until_stats(lambda stats: stats.live == 2)
            assert (await scene.stats()).aborted == 0
            await other.close()

        self.run(scenario)

    def test_a_prefetch_reaches_the_worker_and_is_aborted_as_a_request_is(self) -> None:
        async def scenario(scene: Scene) -> None:
            hashes = scripted_request("echo", [1]).block_hashes
            prefetch = Prefetch(
                request_id=RequestId("a"),
                block_hashes=hashes,
                transfer_id=b"t",
                prefill_worker=WorkerId(1),
                source=KvAccess(agent=b"a"),
            )
            scene.connection.prefetch(prefetch)
            scene.connection.abort(RequestId("a"))
            await scene.until_stats(lambda stats: stats.submitted >= 1 and stats.aborted == 1)
            with pytest.raises(RequestError, match="cannot be sent"):
                scene.connection.prefetch(msgspec.structs.replace(prefetch, request_id=RequestId("\ud800")))
            await scene.connection.close()
            with pytest.raises(WorkerLost):
                scene.connection.prefetch(prefetch)

        self.run(scenario)

    def test_closing_a_connection_ends_its_requests_and_only_those(self) -> None:
        async def scenario(scene: Scene) -> None:
            other = RecordingSink()
            connection = await scene.connect(other)
            connection.submit(scripted_request("silence", request_id="a"))
            scene.connection.submit(scripted_request("silence", request_id="b"))
            await scene.until_stats(lambda stats: stats.live == 2)
            await connection.close()
            await connection.close()
            await scene.until_stats(lambda stats: stats.live == 1)
            assert not other.losses, "who closes is not told of a loss"
            with pytest.raises(WorkerLost):
                connection.submit(scripted_request("echo", [1]))
            connection.abort(RequestId("a"))
            connection.grant(RequestId("a"), 1)

        self.run(scenario)

    def test_a_killed_worker_is_lost_at_once(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.connection.submit(scripted_request("count", request_id="a", max_tokens=10**6))
            await scene.sink.until(lambda: bool(scene.sink.deltas))
            await scene.harness.kill(scene.instance)
            await scene.sink.until(lambda: bool(scene.sink.losses))
            assert "heartbeat" not in scene.sink.losses[0][1].message, "its end is noticed, not its silence"
            with pytest.raises(WorkerLost):
                scene.connection.submit(scripted_request("echo", [1]))
            with pytest.raises(WorkerLost):
                await scene.connection.fetch(FILE_SHA256)
            await asyncio.sleep(0.05)
            assert [worker_id for worker_id, _ in scene.sink.losses] == [scene.instance.worker_id]
            assert str(scene.instance.worker_id) in scene.sink.losses[0][1].message

        self.run(scenario)

    def test_a_worker_that_closes_delivers_what_it_has_pushed(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.connection.submit(scripted_request("goodbye", request_id="a"))
            await scene.sink.until(lambda: bool(scene.sink.losses))
            assert scene.sink.last("a") is not None
            assert "goodbye" in scene.sink.losses[0][1].message

        self.run(scenario)

    def test_connecting_to_an_unused_address_fails(self) -> None:
        async def scenario(scene: Scene) -> None:
            await scene.harness.kill(scene.instance)
            with pytest.raises(WorkerLost, match=scene.instance.name):
                await scene.harness.plane().connect(scene.instance, RecordingSink())

        self.run(scenario)

    @pytest.mark.parametrize("tokens_per_step", [7, 3 * _WINDOW_TOKENS, 20 * _WINDOW_TOKENS])
    def test_a_reader_that_grants_gets_more_than_the_window(self, tokens_per_step: int) -> None:
        async def scenario(scene: Scene) -> None:
            total, taken = 20 * _WINDOW_TOKENS, 0
            scene.connection.submit(
                scripted_request("count", request_id="a", max_tokens=total, tokens_per_step=tokens_per_step)
            )
            while scene.sink.last("a") is None:
                await scene.sink.until(partial(_has_more, scene.sink, taken))
                arrived = len(scene.sink.tokens("a"))
                assert arrived - taken <= _WINDOW_TOKENS
                scene.connection.grant(RequestId("a"), arrived - taken)
                taken = arrived
            assert scene.sink.tokens("a") == list(range(total))

        self.run(scenario, PlaneConfig(window_tokens=_WINDOW_TOKENS))

    def test_deltas_for_a_slow_reader_are_merged(self) -> None:
        async def scenario(scene: Scene) -> None:
            total = 4 * _WINDOW_TOKENS
            scene.connection.submit(scripted_request("count", request_id="a", max_tokens=total))
            await scene.until_stats(lambda stats: stats.live == 0)
            assert scene.sink.tokens("a") == list(range(_WINDOW_TOKENS)), "no more than the window comes"
            scene.connection.grant(RequestId("a"), 2 * _WINDOW_TOKENS)
            await scene.sink.until(lambda: len(scene.sink.tokens("a")) == 3 * _WINDOW_TOKENS)
            assert num_tokens(scene.sink.deltas["a"][-1].token_ids) == 2 * _WINDOW_TOKENS
            assert scene.sink.last("a") is None
            scene.connection.grant(RequestId("a"), 2 * _WINDOW_TOKENS)
            last = await scene.sink.finished("a")
            assert scene.sink.tokens("a") == list(range(total))
            assert last.finish_reason is FinishReason.LENGTH

        self.run(scenario, PlaneConfig(window_tokens=_WINDOW_TOKENS))

    def test_a_reader_that_never_grants_costs_little_and_delays_no_other(self) -> None:
        async def scenario(scene: Scene) -> None:
            before = await scene.stats()
            scene.connection.submit(
                scripted_request("count", request_id="a", max_tokens=_MANY_TOKENS, tokens_per_step=1000)
            )
            growth_kib = turns = 0
            while (stats := await scene.stats()).aborted == 0:
                growth_kib, turns = max(growth_kib, stats.rss_kib - before.rss_kib), turns + 1
                scene.connection.submit(scripted_request("echo", [1], request_id=f"b{turns}"))
                await scene.sink.finished(f"b{turns}")
            assert len(scene.sink.tokens("a")) <= PlaneConfig().window_tokens
            scene.connection.grant(RequestId("a"), _MANY_TOKENS)
            last = await scene.sink.finished("a")
            assert last.error is not None
            assert isinstance(from_info(last.error), Parked), "it goes on once what was held is read"
            assert scene.sink.tokens("a") == list(range(len(scene.sink.tokens("a"))))
            assert len(scene.sink.tokens("a")) < _MANY_TOKENS
            assert growth_kib < _GROWTH_KIB_MAX
            await scene.until_stats(lambda stats: stats.aborted == 1)

        self.run(scenario)

    def test_fetch(self) -> None:
        async def scenario(scene: Scene) -> None:
            assert await scene.connection.fetch(FILE_SHA256) == FILE
            assert await scene.connection.fetch(EMPTY_SHA256) == b""
            with pytest.raises(RequestError) as missing:
                await scene.connection.fetch("f" * 64)
            assert missing.value.http_status == 404
            with pytest.raises(ProtocolError, match="content has the hash"):
                await scene.connection.fetch(WRONG_SHA256)
            contents = await asyncio.gather(*(scene.connection.fetch(FILE_SHA256) for _ in range(8)))
            assert contents == [FILE] * 8

        self.run(scenario)

    def test_a_file_that_is_too_large_is_refused(self) -> None:
        async def scenario(scene: Scene) -> None:
            with pytest.raises(ProtocolError, match="file_bytes_max"):
                await scene.connection.fetch(FILE_SHA256)

        self.run(scenario, PlaneConfig(file_bytes_max=len(FILE) - 1))

    def test_connecting_again_after_a_close(self) -> None:
        async def scenario(scene: Scene) -> None:
            await scene.connection.close()
            sink = RecordingSink()
            connection = await scene.connect(sink)
            connection.submit(scripted_request("echo", [3], request_id="a"))
            await sink.finished("a")
            assert connection.worker_id == scene.instance.worker_id

        self.run(scenario)


def _has_more(sink: RecordingSink, tokens: int) -> bool:
    return len(sink.tokens("a")) > tokens
