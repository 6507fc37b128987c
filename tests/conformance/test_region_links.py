"""The engine `region` against frontends that fail in every way, over real sockets."""

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.core.errors import PenstockError, WrongServerError
from penstock.core.types.requests import FinishReason
from penstock.demo import MODEL_NAME
from penstock.engine.openai.config import LinkConfig
from penstock.engine.openai.region import RegionEngine, RegionServer
from penstock.engine.openai.text import TextCodec
from tests.support.certificates import make_authority, make_certificate
from tests.support.driven_engine import PROMPT, SERVING, TOKENIZER, Driven, make_request, started
from tests.support.fake_server import FakeServer, after, cut, says

FAULTS = {
    "cut": cut,
    "half a line": says(b'data: {"choices": [{"text": "x", "tok', then_cut=True),
    "half a message": says(b"data", then_cut=True),
}


def config_of(*urls: str, **fields: Any) -> LinkConfig:
    quick = {
        "limits": {"connect_timeout_s": 1, "silence_s": 10.0},
        "health": {"interval_s": 0.1, "timeout_s": 1.0, "retry_s_max": 0.2},
        "load_interval_s": 0.1,
    }
    return LinkConfig.parse({"name": "eu", "here": "us", "urls": urls} | quick | fields, source="test")


def link_of(*urls: str, **fields: Any) -> RegionEngine:
    config = config_of(*urls, **fields)
    server = RegionServer(config, (MODEL_NAME,), TextCodec(TOKENIZER))
    return RegionEngine(server, config, SERVING)


@asynccontextmanager
async def linked(*fakes: FakeServer, **fields: Any) -> AsyncIterator[Driven]:
    engine = link_of(*(fake.url for fake in fakes), **fields)
    async with started(engine) as case:
        yield case


@asynccontextmanager
async def region(
    count: int, *, tls: ssl.SSLContext | None = None, **fields: Any
) -> AsyncIterator[list[FakeServer]]:
    async with AsyncExitStack() as stack:
        fakes = [FakeServer(TOKENIZER, "penstock", **fields) for _ in range(count)]
        for fake in fakes:
            fake.tls = tls
            await stack.enter_async_context(fake)
        yield fakes


async def start_error(*urls: str, **fields: Any) -> PenstockError:
    """Start a link that cannot be; give what it says."""
    engine = link_of(*urls, **fields)
    with pytest.raises(PenstockError) as caught:
        await engine.start()
    await engine.close()
    return caught.value


async def test_connections_are_kept_and_used_again() -> None:
    async with region(1) as (fake,), linked(fake) as case:
        for number in range(20):
            await case.ask(f"r{number}")
        assert len(fake.bodies) >= 20
        assert len(fake.ports) < 10, "checks of health and load have one each"


async def test_an_abort_closes_its_connection() -> None:
    async with region(1, token_s=0.05) as (fake,), linked(fake) as case:
        case.engine.submit(make_request("a", max_tokens=400))
        await case.until(lambda: bool(case.deltas.get("a")))
        case.engine.abort("a")
        await case.until(lambda: fake.open == 0 and fake.aborted == 1)
        await case.ask("b")
        assert case.tokens("b") == fake.continuation(PROMPT, 12)


async def test_the_way_is_measured_on_open_connections_and_pauses_do_not_count() -> None:
    async with region(2) as fakes, linked(*fakes) as case:

        def measured_s() -> float:
            return 0.0 if case.load.link is None else case.load.link.round_trip_s

        assert case.engine.load().link.round_trip_s > 0, "asked at its start, before any request"
        for fake in fakes:
            fake.answer_s = 0.3
        await case.until(lambda: measured_s() >= 0.3)
        for fake in fakes:
            fake.answer_s = 0.0
        await case.until(lambda: 0 < measured_s() < 0.3)


async def test_what_is_wrong_with_a_region_is_reported_by_its_kind() -> None:
    async with region(1) as (fake,), linked(fake) as case:

        def problem() -> str:
            return case.engine.load().link.problem

        assert problem() == ""
        fake.key = "another"
        await case.until(lambda: problem() == "key")
        fake.key = None
        await case.until(lambda: problem() == "")
        fake.told = {"region": "asia"}
        await case.until(lambda: problem() == "other_server")
        fake.told = {}
        await case.until(lambda: problem() == "")
        fake.health_status = 500
        await case.until(lambda: case.load.link is not None and case.load.link.problem == "unreachable")


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("at", [0, 1, 5, 11])
async def test_an_answer_that_a_frontend_breaks_goes_on_at_another_with_the_same_tokens(
    name: str, at: int
) -> None:
    async with region(2) as fakes, linked(*fakes) as case:
        broken = itertools.count()
        fault = after(at, FAULTS[name])

        async def once(server: FakeServer, response: web.StreamResponse, count: int) -> None:
            if count == at and next(broken) == 0:
                await fault(server, response, count)

        for fake in fakes:
            fake.fault = once
        end = await case.ask("a", seed=7, temperature=1.0)
        assert end.finish_reason is FinishReason.LENGTH, end
        assert next(broken), "it was broken"
        expected = list(PROMPT)
        for _ in range(12):
            expected.append(fakes[0].next_token(expected, 7))
        assert case.tokens("a") == expected[len(PROMPT) :]
        assert case.engine.load().link.moved <= 1


async def test_a_region_is_given_up_once_all_its_frontends_have_failed_without_a_token() -> None:
    async with region(2) as fakes, linked(*fakes) as case:
        for fake in fakes:
            fake.fault = after(0, cut)
        end = await case.ask("a")
        assert end.error is not None
        assert end.error.code == "unavailable"
        assert "region eu" in end.error.message
        assert "127.0.0.1" not in end.error.message
        assert case.tokens("a") == []


async def test_a_frontend_that_ends_moves_its_streams_and_comes_back() -> None:
    async with region(2, token_s=0.02) as fakes, linked(*fakes) as case:
        for number in range(6):
            case.engine.submit(make_request(f"r{number}", max_tokens=40))
        await case.until(lambda: all(fake.open == 3 for fake in fakes))
        await fakes[0].stop()
        for number in range(6):
            end = await case.ends(f"r{number}")
            assert end.error is None, end.error
            assert case.tokens(f"r{number}") == fakes[1].continuation(PROMPT, 40)
        assert case.engine.load().link.healthy == 1
        assert case.problems in ([], [None]), "the region serves"
        await fakes[0].start()
        await case.until(lambda: case.engine.load().link.healthy == 2)


async def test_a_silent_frontend_loses_its_streams_to_another() -> None:
    async with region(2, token_s=0.02) as fakes, linked(*fakes) as case:
        for number in range(4):
            case.engine.submit(make_request(f"r{number}", max_tokens=50))
        await case.until(lambda: all(fake.open == 2 for fake in fakes))
        fakes[0].silent = True
        for number in range(4):
            end = await case.ends(f"r{number}")
            assert end.error is None, end.error
            assert case.tokens(f"r{number}") == fakes[1].continuation(PROMPT, 50)
        fakes[0].silent = False


async def test_a_frontend_that_drains_gets_no_new_requests_and_keeps_its_streams() -> None:
    async with region(2, token_s=0.02) as fakes, linked(*fakes) as case:
        for number in range(2):
            case.engine.submit(make_request(f"r{number}", max_tokens=50))
        await case.until(lambda: all(fake.open == 1 for fake in fakes))
        fakes[0].health_status = 503
        fakes[0].refuse = lambda: web.json_response({"error": {"message": "drains"}}, status=503)
        await case.until(lambda: case.engine.load().link.healthy == 1)
        before = len(fakes[0].bodies)
        for number in range(2, 8):
            end = await case.ask(f"r{number}")
            assert end.error is None, end.error
        assert len(fakes[0].bodies) == before
        for number in range(2):
            assert (await case.ends(f"r{number}")).error is None
        assert fakes[0].aborted == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_a_region_without_room_can_be_asked_again(status: int) -> None:
    async with region(2) as fakes, linked(*fakes) as case:
        for fake in fakes:
            fake.refuse = lambda: web.json_response(
                {"error": {"message": "full"}}, status=status, headers={"Retry-After": "2"}
            )
        end = await case.ask("a")
        assert end.error is not None
        assert (end.error.code, end.error.http_status) == ("unavailable", 503), (
            "no refusal, which would end it"
        )
        assert end.error.message == f"region eu: {status}: full"
        assert case.engine.load().link.refused == 1
        assert case.problems == [], "it is not ill"


async def test_a_region_that_accepts_and_never_answers_loses_the_request_and_then_gets_none() -> None:
    limits = {"connect_timeout_s": 1, "silence_s": 0.3}
    async with region(1) as (fake,), linked(fake, limits=limits) as case:

        async def hangs(_server: FakeServer, _response: web.StreamResponse, _at: int) -> None:
            await asyncio.sleep(60)

        fake.fault = hangs
        for number in range(2):
            end = await case.ask(f"r{number}")
            assert end.error is not None
            assert "region eu: no answer within 0.3 s" in end.error.message
        await case.until(lambda: bool(case.problems) and case.problems[-1] is not None)
        fake.fault = None
        await case.until(lambda: case.problems[-1] is None)
        assert (await case.ask("b")).error is None


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"region": "us"}, "its frontends are of 'us', the region of this link"),
        ({"region": "asia"}, "are of region 'asia', expected 'eu'"),
        ({"region": ""}, "do not say their region, expected 'eu'"),
        ({"link_version": 0}, "it has an older release, this one link version 1"),
        ({"link_version": 3}, "it has link version 3, this one link version 1"),
    ],
)
async def test_a_wrong_region_is_refused_with_a_reason(told: dict[str, Any], message: str) -> None:
    async with region(1) as (fake,):
        fake.told = told
        error = await start_error(fake.url)
        assert isinstance(error, WrongServerError)
        assert message in error.message
        assert fake.load_queries[0]["region"] == "us"


async def test_a_server_that_is_no_penstock_is_refused() -> None:
    async with FakeServer(TOKENIZER, "vllm") as fake:
        error = await start_error(fake.url)
        assert isinstance(error, WrongServerError)
        assert "no frontends of Penstock answer there" in error.message


async def test_a_wrong_key_is_told(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-wrong\n")
    async with region(1) as (fake,):
        fake.key = "sk-right"
        error = await start_error(fake.url, api_key_file=str(tmp_path / "key"))
        assert isinstance(error, WrongServerError)
        assert error.message.startswith("region eu: 401: Unauthorized")
        assert "api_key_file" in error.message


async def test_clocks_that_differ_are_measured() -> None:
    async with region(1) as (fake,), linked(fake) as case:
        assert abs(case.engine.load().link.clock_skew_s) < 10
        fake.told = {"time_s": time.time() + 3600}
        await case.until(lambda: case.engine.load().link.clock_skew_s > 3000)
        await case.until(lambda: float(fake.load_queries[-1]["skew_s"]) < -3000)
        assert (await case.ask("a")).error is None, "it is told, and serves"


@pytest.mark.needs("openssl")
async def test_a_certificate_of_another_authority_is_told_and_the_right_one_serves(tmp_path: Path) -> None:
    right, wrong = (make_authority(tmp_path, name) for name in ("right", "wrong"))
    own = make_certificate(tmp_path, "region", right, address="127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    async with region(1, tls=context) as (fake,):
        error = await start_error(fake.url, tls={"authority": str(wrong)})
        assert "region eu: no TLS connection: " in error.message
        async with linked(fake, tls={"authority": str(right)}) as case:
            assert (await case.ask()).error is None


async def test_a_region_that_is_not_there_is_named_without_its_address() -> None:
    error = await start_error("http://127.0.0.1:9", "http://127.0.0.1:10")
    assert error.message == "region eu: no connection: connection refused"


async def test_each_request_says_that_it_is_forwarded_and_how_far_it_is() -> None:
    async with region(1) as (fake,), linked(fake) as case:
        case.engine.submit(make_request("a", [*PROMPT, 5, 6], num_emitted=2))
        await case.ends("a")
        assert fake.bodies[-1]["continuation"] == {"num_emitted": 2, "choice": 0}
        assert json.dumps(fake.bodies[-1]["prompt"][-2:]) == "[5, 6]"
