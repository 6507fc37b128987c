"""A request's whole life, on virtual time, with real workers and engines driven by hand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from penstock.core.errors import (
    DeadlineExceeded,
    EngineError,
    Overloaded,
    PenstockError,
    RequestError,
    StepFailed,
    Unavailable,
)
from penstock.core.hashing import DEFAULT_KEY, block_hashes
from penstock.core.ids import RequestId
from penstock.core.types.instances import CardFile, ModelCard
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_hashes, unpack_tokens
from penstock.router.config import MigrationConfig, RetryConfig, RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.dispatch.open_request import OpenRequest
from penstock.sim.loop import run_virtual
from tests.support import scene
from tests.support.cluster import MemoryCluster, small_card
from tests.support.manual_engine import ManualEngine
from tests.support.scenes import scenes

PROMPT = (5, 6, 7, 8, 9, 10)


def make_request(request_id: str = "r", prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Request:
    return scene.make_request(request_id, prompt, **{"max_tokens": 100} | fields)


class Setting:
    """Workers `w1`, `w2`, ... with hand-driven engines, and one dispatcher that knows them."""

    def __init__(
        self, cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]
    ) -> None:
        self.cluster = cluster
        self.dispatcher = dispatcher
        self.engines = engines

    async def add(self, name: str, **options: object) -> ManualEngine:
        engine = self.engines[name] = ManualEngine()
        await self.cluster.start(name, engine, **options)
        await asyncio.sleep(0.01)
        return engine

    def holder(self, request_id: str = "r") -> str:
        """Name the worker that runs a request."""
        (name,) = (name for name, engine in self.engines.items() if request_id in engine.requests)
        return name

    def end(self, request_id: str, error: PenstockError) -> None:
        """Have the worker that runs a request end it with an error."""
        delta = Delta(
            request_id=RequestId(request_id), error=error.to_info(), finish_reason=FinishReason.ERROR
        )
        self.engines[self.holder(request_id)].step(deltas=[delta])

    def kill(self, name: str) -> None:
        self.cluster.kill(name)
        del self.engines[name]

    def check_nothing_left(self) -> None:
        self.dispatcher.check()
        for view in self.dispatcher.workers():
            assert view.open_requests == view.reserved_requests == view.reserved_blocks == 0
        for engine in self.engines.values():
            assert not engine.requests
        assert all(journey.outcome is not None for journey in self.dispatcher.latest_journeys(9))


def run_scenario(
    scene: Callable[[Setting], Awaitable[None]], num_workers: int = 2, config: RouterConfig | None = None
) -> None:
    async def main() -> None:
        async with MemoryCluster() as cluster, cluster.dispatcher(config) as dispatcher:
            setting = Setting(cluster, dispatcher, {})
            for number in range(1, num_workers + 1):
                await setting.add(f"w{number}")
            await scene(setting)
            await asyncio.sleep(0.2)
            setting.check_nothing_left()

    run_virtual(main())


scenario = scenes(run_scenario, 1)


def ids(delta: Delta) -> list[int]:
    return unpack_tokens(delta.token_ids).tolist()


async def settle() -> None:
    """Let every message that is on its way arrive; no timer fires."""
    for _ in range(20):
        await asyncio.sleep(0)


async def finish(setting: Setting, stream: OpenRequest, request_id: str = "r") -> list[int]:
    """Have the worker end the request; returns what the reader still gets."""
    await settle()
    setting.engines[setting.holder(request_id)].emit(request_id, 99, finish=FinishReason.STOP)
    return [token async for delta in stream for token in ids(delta)]


@scenario()
async def test_hashes_are_computed_where_they_are_missing_and_checked_where_not(setting):
    async with setting.dispatcher.open(make_request()) as stream:
        await settle()
        (sent,) = setting.engines[setting.holder()].submitted
        assert sent.block_hashes == pack_hashes(block_hashes(PROMPT, 4, b"tiny-1"))
        await finish(setting, stream)
    wrong = make_request("x", block_hashes=pack_hashes(block_hashes(PROMPT, 2)))
    with pytest.raises(RequestError, match="got 3 for 6 tokens, expected 1") as caught:
        async with setting.dispatcher.open(wrong):
            pass
    assert caught.value.param == "block_hashes"


@scenario()
async def test_the_deadline_ends_a_stream_and_its_engine_work(setting):
    loop = asyncio.get_running_loop()
    opened_s = loop.time()
    async with setting.dispatcher.open(make_request(deadline_s=2.0)) as stream:
        await settle()
        engine = setting.engines[setting.holder()]
        assert engine.submitted[0].deadline_s == 2.0
        engine.emit("r", 1)
        assert ids(await anext(stream)) == [1]
        with pytest.raises(DeadlineExceeded, match="2 s have passed and 1 of at most 100 tokens"):
            await anext(stream)
        assert loop.time() - opened_s == pytest.approx(2.0)
        await settle()
        assert engine.aborted == ["r"]
        with pytest.raises(DeadlineExceeded):
            await anext(stream)


@scenario()
async def test_the_deadline_does_not_spoil_an_answer_that_is_complete(setting):
    async with setting.dispatcher.open(make_request(deadline_s=2.0)) as stream:
        await settle()
        setting.engines[setting.holder()].emit("r", 1, finish=FinishReason.STOP)
        await asyncio.sleep(5.0)
        assert [ids(delta) async for delta in stream] == [[1]]


@scenario()
async def test_a_stream_goes_on_where_its_worker_was_lost(setting):
    async with setting.dispatcher.open(make_request(deadline_s=60.0)) as stream:
        await settle()
        first = setting.holder()
        setting.engines[first].emit("r", 1, cached_tokens=4)
        assert ids(await anext(stream)) == [1]
        setting.engines[first].emit("r", 2)
        setting.engines[first].emit("r", 3)
        await settle()  # 2 and 3 are here, not read yet
        setting.kill(first)
        assert ids(await anext(stream)) == [2, 3]
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(1.0)
        (moved,) = setting.engines[setting.holder()].submitted
        assert unpack_tokens(moved.token_ids).tolist() == [*PROMPT, 1, 2, 3]
        assert moved.num_emitted == 3
        assert moved.block_hashes == pack_hashes(block_hashes([*PROMPT, 1, 2, 3], 4, b"tiny-1"))
        assert moved.sampling.max_tokens == 100
        assert 58.0 < moved.deadline_s < 60.0
        setting.engines[setting.holder()].emit("r", 4, cached_tokens=0)
        delta = await reading
        assert ids(delta) == [4]
        assert delta.cached_tokens is None
        assert await finish(setting, stream) == [99]
    assert stream.migrations == 1
    assert (stream.prompt_tokens, stream.cached_tokens, stream.output_tokens) == (6, 4, 5)


@scenario(num_workers=4)
async def test_a_request_that_loses_worker_after_worker_is_quarantined(setting):
    async with setting.dispatcher.open(make_request()) as stream:
        reading = asyncio.ensure_future(anext(stream))
        for _ in range(3):
            await asyncio.sleep(0.5)
            setting.kill(setting.holder())
        with pytest.raises(
            Unavailable, match=r"failed one after another, .* refused for 60 s; send it again"
        ):
            await reading
    assert stream.migrations == 2
    with pytest.raises(Unavailable, match="refused for 60 s") as caught:
        async with setting.dispatcher.open(make_request("again")):
            pass
    assert caught.value.http_status == 503
    assert 59.0 < caught.value.retry_after_s <= 60.0
    async with setting.dispatcher.open(make_request("other", (1, 2, 3))) as other:
        await finish(setting, other, "other")
    await asyncio.sleep(60.0)
    async with setting.dispatcher.open(make_request("later")) as later:
        assert await finish(setting, later, "later") == [99]


@scenario(num_workers=1)
async def test_a_worker_that_fails_every_request_blames_none(setting):
    async with setting.dispatcher.open(make_request()) as stream:
        reading = asyncio.ensure_future(anext(stream))
        for _ in range(4):
            await asyncio.sleep(2.0)
            setting.end("r", StepFailed("the step failed"))
            await settle()
            assert not any(engine.requests for engine in setting.engines.values()), (
                "it waits before it goes there again"
            )
        await asyncio.sleep(2.0)
        setting.engines[setting.holder()].emit("r", 7, finish=FinishReason.STOP)
        assert ids(await reading) == [7]
    async with setting.dispatcher.open(make_request("again")) as again:
        assert await finish(setting, again, "again") == [99]


@scenario(config=RouterConfig(migrations=MigrationConfig(stalled_s_max=10.0)))
async def test_who_gets_nowhere_for_too_long_ends_where_workers_stop(setting):
    async with setting.dispatcher.open(make_request()) as stream:
        reading = asyncio.ensure_future(anext(stream))
        for number in range(4):
            await asyncio.sleep(4.0)
            setting.end("r", Unavailable("stopping"))
            await setting.add(f"another-{number}")
        with pytest.raises(Unavailable, match="failed again and again for 12 s"):
            await reading


@scenario()
async def test_workers_that_cannot_serve_for_now_are_tried_again_later_and_not_for_ever(setting):
    tries = 0
    loop = asyncio.get_running_loop()

    async def refuse(request_id: str = "r") -> None:
        nonlocal tries
        await settle()
        tries += 1
        setting.end(request_id, Unavailable("its server is away"))

    async with setting.dispatcher.open(make_request()) as stream:
        reading, begun_s = asyncio.ensure_future(anext(stream)), loop.time()
        while not reading.done():
            if any(engine.requests for engine in setting.engines.values()):
                await refuse()
            await asyncio.sleep(0.01)
        with pytest.raises(
            Unavailable, match=r"no worker could serve it in 9 tries, at 2 workers .* its server is away"
        ):
            await reading
        assert tries == 9
        assert 5.0 < loop.time() - begun_s < 20.0
    async with setting.dispatcher.open(make_request("again")) as stream:
        reading = asyncio.ensure_future(anext(stream))
        for _ in range(3):
            await refuse("again")
            await asyncio.sleep(2.0)
        setting.engines[setting.holder("again")].emit("again", 7, finish=FinishReason.STOP)
        assert (await reading).finish_reason is FinishReason.STOP


@scenario()
async def test_lost_after_the_last_token_is_the_end(setting):
    async with setting.dispatcher.open(make_request(max_tokens=2)) as stream:
        await settle()
        name = setting.holder()
        setting.engines[name].emit("r", 1)
        setting.engines[name].emit("r", 2)
        await settle()
        setting.kill(name)
        await settle()
        (delta,) = [delta async for delta in stream]
    assert ids(delta) == [1, 2]
    assert delta.finish_reason is FinishReason.LENGTH


@scenario()
async def test_refused_by_all_is_an_error_with_its_delay(setting):
    for engine in setting.engines.values():
        engine.refusal = Overloaded("the queue is full", retry_after_s=3.0)
    with pytest.raises(
        Overloaded, match=r"every worker that is ready has refused.*the queue is full"
    ) as caught:
        async with setting.dispatcher.open(make_request()) as stream:
            await anext(stream)
    assert caught.value.retry_after_s == 3.0


@pytest.mark.parametrize(
    ("retries", "tries"), [(RetryConfig(), 4), (RetryConfig(burst=2, per_request=0.0), 3)]
)
def test_refusals_are_bounded_and_need_the_budget(retries, tries):
    async def scene(setting: Setting) -> None:
        for engine in setting.engines.values():
            engine.refusal = Overloaded("the queue is full")
        with pytest.raises(Overloaded, match="the queue is full"):
            async with setting.dispatcher.open(make_request()) as stream:
                await anext(stream)
        assert setting.cluster.figure("refusals_total") == tries

    run_scenario(scene, num_workers=6, config=RouterConfig(retries=retries))


@pytest.mark.parametrize(
    "error", [RequestError("too long", param="messages"), EngineError("NaN"), ValueError("a bug")]
)
@scenario()
async def test_other_refusals_are_the_answer(setting, error):
    for engine in setting.engines.values():
        engine.refusal = error
    expected = type(error) if isinstance(error, PenstockError) else EngineError
    with pytest.raises(expected, match=str(error)) as caught:
        async with setting.dispatcher.open(make_request()) as stream:
            await anext(stream)
    assert caught.value.param == getattr(error, "param", None)


@scenario(config=RouterConfig(open_requests_max=2))
async def test_open_requests_are_bounded_and_ids_are_unique(setting):
    async with setting.dispatcher.open(make_request("a")) as a:
        with pytest.raises(RequestError, match="a is under way already"):
            async with setting.dispatcher.open(make_request("a")):
                pass
        async with setting.dispatcher.open(make_request("b")) as b:
            with pytest.raises(Overloaded, match="2 requests are under way") as caught:
                async with setting.dispatcher.open(make_request("c")):
                    pass
            assert caught.value.retry_after_s
            await finish(setting, b, "b")
        await finish(setting, a, "a")


@pytest.mark.virtual
async def test_closing_the_dispatcher_ends_streams_clearly():
    async with MemoryCluster() as cluster:
        engine = ManualEngine()
        await cluster.start("w1", engine)
        async with cluster.dispatcher() as dispatcher:
            await asyncio.sleep(0.01)
            stream = await dispatcher.open(make_request()).__aenter__()
            reading = asyncio.ensure_future(anext(stream))
            await settle()
        with pytest.raises(Unavailable, match="shutting down"):
            await reading
        assert engine.aborted == ["r"]
        await stream.__aexit__(None, None, None)


@scenario()
async def test_metrics_count_outcomes(setting):
    async with setting.dispatcher.open(make_request("a")) as stream:
        await finish(setting, stream, "a")
    async with setting.dispatcher.open(make_request("b")):
        pass
    with pytest.raises(RequestError):
        async with setting.dispatcher.open(make_request("c")), setting.dispatcher.open(make_request("c")):
            pass
    for outcome, count in {"stop": 1, "cancelled": 2, "invalid_request_error": 1}.items():
        assert setting.cluster.figure("requests_total", outcome=outcome) == count
    assert setting.cluster.figure("output_tokens_total") == 1
    assert setting.cluster.figure("open_requests") == 0


@asynccontextmanager
async def replaced(setting: Setting, card: ModelCard) -> AsyncIterator[ManualEngine]:
    """Have a worker with another card beside w1, which is lost at the end of the block; give its engine."""
    other = ManualEngine()
    other.info = msgspec.structs.replace(other.info, block_size=card.block_size)
    await setting.cluster.start("new", other, card=card)
    await asyncio.sleep(0.01)
    yield other
    setting.kill("w1")
    await asyncio.sleep(10.0)  # its lease lapses


@scenario(num_workers=1)
async def test_a_model_replaced_by_one_with_other_blocks_ends_what_has_tokens(setting):
    async with setting.dispatcher.open(make_request()) as stream:
        await settle()
        async with replaced(setting, small_card(block_size=8)):
            setting.engines["w1"].emit("r", 1)
            await anext(stream)
        with pytest.raises(Unavailable, match="was replaced by one with other blocks"):
            await anext(stream)


@pytest.mark.parametrize("changes", [{"block_size": 8}, {"salt": b"revision 2"}], ids=["blocks", "salt"])
@scenario(num_workers=1)
async def test_a_request_without_tokens_goes_on_at_the_models_next_revision_by_its_hashes(setting, changes):
    card = msgspec.structs.replace(small_card(), **changes)
    sent = msgspec.structs.replace(make_request(), salt=small_card().salt + b"|cache_salt=t")
    async with setting.dispatcher.open(sent) as stream:
        await settle()
        reading = asyncio.ensure_future(anext(stream))  # who reads sends it again
        async with replaced(setting, card) as other:
            pass
        (request,) = other.requests.values()
        assert request.salt == card.salt + b"|cache_salt=t"
        expected = block_hashes(
            unpack_tokens(request.token_ids),
            card.block_size,
            request.salt,
            key=DEFAULT_KEY,
        )
        assert request.block_hashes == pack_hashes(expected)
        other.emit("r", 5, finish=FinishReason.STOP)
        assert (await reading).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("is_text_alike", [True, False])
@scenario(num_workers=1)
async def test_a_request_prepared_for_a_former_revision_is_hashed_anew_or_refused_where_its_text_differs(
    setting, is_text_alike
):
    former = small_card()
    files = () if is_text_alike else (CardFile(name="tokenizer.json", sha256="0", size_bytes=1),)
    async with replaced(setting, msgspec.structs.replace(former, salt=b"revision 2", files=files)) as other:
        pass
    late = msgspec.structs.replace(make_request("late"), salt=former.salt)
    if is_text_alike:
        async with setting.dispatcher.open(late):
            await settle()
            assert [request.salt for request in other.submitted] == [b"revision 2"]
    else:
        with pytest.raises(Unavailable, match="another tokenizer or chat template"):
            await setting.dispatcher.open(late).__aenter__()


async def read_one(stream: OpenRequest) -> None:
    async with stream:
        await anext(stream)


@pytest.mark.parametrize(
    ("stale_routes_max", "expected"),
    [(RetryConfig().stale_routes_max, [1] * 8), (0, [0] * 6 + [4, 4])],
    ids=["again", "equal prompts on equal workers: all routers choose alike"],
)
@pytest.mark.virtual
async def test_routers_that_choose_at_the_same_moment_choose_again_where_others_came_first(
    stale_routes_max, expected
):
    """Four routers get two requests each at the same moment, and so many of eight workers have them then."""
    config = RouterConfig(retries=RetryConfig(stale_routes_max=stale_routes_max))
    async with MemoryCluster() as cluster, AsyncExitStack() as stack:
        engines = [ManualEngine() for _ in range(8)]
        for number, engine in enumerate(engines):
            await cluster.start(f"w{number}", engine)
        dispatchers = [await stack.enter_async_context(cluster.dispatcher(config)) for _ in range(4)]
        await asyncio.sleep(0.01)
        async with asyncio.TaskGroup() as readers:
            tasks = [
                readers.create_task(read_one(dispatcher.open(make_request(f"r{n}-{m}"))))
                for n, dispatcher in enumerate(dispatchers)
                for m in (1, 2)
            ]
            await asyncio.sleep(0.01)
            assert sorted(len(engine.requests) for engine in engines) == expected
            for dispatcher in dispatchers:
                dispatcher.check()
            assert cluster.figure("prompt_tokens_total") == 8 * len(PROMPT), "however often they were sent"
            assert cluster.figure("decisions_total", policy="kv", reason="no_prefix") == 8
            assert (cluster.figure("stale_routes_total") > 0) == (stale_routes_max > 0)
            for task in tasks:
                task.cancel()
