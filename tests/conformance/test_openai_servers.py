"""Engine `openai` against servers of every language, and against hostile ones, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec import structs
from tokenizers import Tokenizer

from penstock.core.errors import ConfigError, Overloaded, RequestError, StepFailed, Unavailable
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.types.events import BlockStored
from penstock.core.types.instances import ModelCard, Role
from penstock.core.types.requests import FinishReason, Request
from penstock.core.wire import hash_list, pack_tokens, token_list
from penstock.demo import MODEL_DIR, MODEL_NAME
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.engine import ServerEngine, Serving
from penstock.engine.openai.events import followed
from penstock.engine.openai.paired import PairedServerEngine
from penstock.engine.openai.server import EngineServer
from penstock.engine.openai.text import TextCodec
from penstock.frontend.text.tokens import Detokenizer
from tests.support.driven_engine import PROMPT, SERVING, TOKENIZER, Driven, make_request, started
from tests.support.fake_server import FakeServer, after, cut, says
from tests.support.tokenizer import tiny_tokenizer_json

IDS_APIS = ("vllm", "trtllm", "sglang", "llamacpp")
TEXT_APIS = ("ollama", "text")


def config_of(url: str, **fields: Any) -> ServerConfig:
    quick = {
        "limits": {"connect_timeout_s": 1, "silence_s": 10.0, "line_bytes_max": 4096},
        "health": {"interval_s": 0.05, "timeout_s": 5.0, "retry_s_max": 0.2},
        "load_interval_s": 0.05,
    }
    return ServerConfig.parse({"url": url} | quick | fields, source="test")


@asynccontextmanager
async def driven(
    fake: FakeServer, serving: Serving = SERVING, *, paired: bool = False, **fields: Any
) -> AsyncIterator[Driven]:
    config = config_of(fake.url, **fields)
    role = Role.PREFILL if paired else Role.AGGREGATED
    server = EngineServer(fake.url, config, (MODEL_NAME,), TextCodec(TOKENIZER), role=role)
    engine = (PairedServerEngine if paired else ServerEngine)(server, config, serving)
    async with started(engine) as case:
        yield case


def fake_of(
    api: str = "vllm", *, health_status: int = 200, key: str | None = None, metrics: str = "", **fields: Any
) -> FakeServer:
    fake = FakeServer(TOKENIZER, api, **fields)
    fake.health_status, fake.key, fake.metrics = health_status, key, metrics
    return fake


# -- answers


@pytest.mark.parametrize("api", IDS_APIS)
async def test_token_ids_go_in_and_come_out(api: str) -> None:
    async with fake_of(api) as fake, driven(fake) as case:
        end = await case.ask(max_tokens=12, ignore_eos=True)
        assert case.tokens("a") == fake.continuation(PROMPT, 12)
        assert end.finish_reason is FinishReason.LENGTH
        assert case.begun == ["a"]
        cached = [delta.cached_tokens for delta in case.deltas["a"] if delta.cached_tokens is not None]
        assert cached == [{"vllm": 7, "trtllm": 7, "sglang": 5, "llamacpp": 3}[api]]
        assert fake.open == 0


@pytest.mark.parametrize("api", TEXT_APIS)
async def test_text_becomes_tokens_that_are_the_same_text(api: str) -> None:
    async with fake_of(api) as fake, driven(fake) as case:
        end = await case.ask(max_tokens=30)
        decoder = Detokenizer(TOKENIZER, tiny_tokenizer_json()).stream()
        text = decoder.feed(case.tokens("a")) + decoder.finish()
        assert text == TOKENIZER.decode(fake.continuation(PROMPT, 30))
        assert end.finish_reason is FinishReason.LENGTH
        assert isinstance(fake.bodies[-1]["prompt"], str)


@pytest.mark.parametrize("api", [*IDS_APIS, *TEXT_APIS])
async def test_an_end_of_sequence_token_is_the_last_of_its_delta(api: str) -> None:
    async with fake_of(api, eos_share=5) as fake, driven(fake) as case:
        end = await case.ask(max_tokens=400)
        assert end.finish_reason is FinishReason.STOP
        assert token_list(end.token_ids) == [0]
        assert 0 not in case.tokens("a")[:-1]


@pytest.mark.parametrize("api", IDS_APIS)
async def test_logprobs_come_with_every_token(api: str) -> None:
    async with fake_of(api) as fake, driven(fake) as case:
        await case.ask(max_tokens=5, logprobs=1, ignore_eos=True)
        logprobs = [each for delta in case.deltas["a"] for each in delta.logprobs]
        assert [each.token_id for each in logprobs] == case.tokens("a")
        assert {each.logprob for each in logprobs} == {-0.5}
        assert all(each.top == ((each.token_id, -0.5),) for each in logprobs)


@pytest.mark.parametrize("api", IDS_APIS)
async def test_a_request_that_comes_with_tokens_goes_on_from_them(api: str) -> None:
    async with fake_of(api) as fake, driven(fake) as case:
        whole = fake.continuation(PROMPT, 12)
        case.engine.submit(
            make_request("b", PROMPT + whole[:5], num_emitted=5, max_tokens=12, ignore_eos=True)
        )
        await case.ends("b")
        assert case.tokens("b") == whole[5:]


async def test_a_server_that_ignores_max_tokens_is_cut_short() -> None:
    async def more(_server: FakeServer, response: web.StreamResponse, count: int) -> None:
        if count == 11:
            ids = ",".join("9" for _ in range(50))
            await response.write(b'data: {"choices":[{"text":"","token_ids":[%s]}]}\n\n' % ids.encode())

    async with fake_of() as fake, driven(fake) as case:
        fake.fault = more
        end = await case.ask(max_tokens=12, ignore_eos=True)
        assert len(case.tokens("a")) == 12
        assert end.finish_reason is FinishReason.LENGTH


async def test_an_abort_closes_the_connection_and_no_delta_follows() -> None:
    async with fake_of(token_s=0.01) as fake, driven(fake) as case:
        case.engine.submit(make_request("a", max_tokens=2000, ignore_eos=True))
        await case.until(lambda: "a" in case.deltas)
        case.engine.abort(RequestId("a"))
        count = len(case.deltas["a"])
        await case.until(lambda: fake.aborted == 1 and fake.open == 0)
        assert len(case.deltas["a"]) == count
        assert case.engine.load().running_requests == 0


async def test_the_clients_cache_salt_reaches_vllm() -> None:
    async with fake_of() as fake, driven(fake) as case:
        for name, salt in (("a", b"card"), ("b", b"card|cache_salt=tenant")):
            request = make_request(name)
            case.engine.submit(
                Request(
                    request_id=request.request_id,
                    model="m",
                    token_ids=request.token_ids,
                    sampling=request.sampling,
                    salt=salt,
                )
            )
            await case.ends(name)
        assert [body.get("cache_salt") for body in fake.bodies[-2:]] == [None, "tenant"]


# -- at start


REFUSED_AT_THE_START = {
    "another model": (
        lambda: fake_of(model="other/model-7b"), {}, ConfigError,
        "serves 'other/model-7b', expected 'penstock-demo'.*--engine-arg model=NAME",
    ),
    "a long name of a model": (lambda: fake_of(model="x" * 100_000), {}, ConfigError, "serves 'xxx"),
    "another tokenizer": (
        lambda: FakeServer(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))), {}, ConfigError,
        "its tokenizer gives other ids",
    ),
    "not healthy": (lambda: fake_of(health_status=503), {}, Unavailable, "/health: 503: not well"),
    "no such path": (lambda: fake_of("trtllm"), {"api": "vllm"}, Unavailable, "a trial request of one token failed"),
    "a key": (lambda: fake_of(key="secret"), {}, ConfigError, "api_key_file"),
    "blocks of another size": (
        lambda: fake_of(metrics='vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n'),
        {"serving": replace(SERVING, follow=(lambda _publish: object(),))}, ConfigError, "block_size: 32",
    ),
    "a pair that is neither vLLM, SGLang nor TensorRT-LLM": (
        lambda: fake_of("llamacpp"), {"paired": True}, ConfigError, "must be vLLM, SGLang or TensorRT-LLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_AT_THE_START)
async def test_a_server_that_cannot_be_used_is_refused_at_the_start(name: str) -> None:
    make, fields, kind, said = REFUSED_AT_THE_START[name]
    async with make() as fake:
        with pytest.raises(kind, match=said) as refused:
            async with driven(fake, **fields):
                pass
    assert len(str(refused.value)) < 1000


async def test_a_name_given_for_the_server_is_used() -> None:
    async with fake_of(model="other") as fake, driven(fake, model="other") as case:
        await case.ask()
        assert fake.bodies[-1]["model"] == "other"


async def test_a_server_whose_api_the_graph_names_is_no_deployment_whoever_owns_its_models() -> None:
    async with fake_of("vllm") as fake:
        fake.models = msgspec.json.encode({"data": [{"id": MODEL_NAME, "owned_by": "penstock"}]})
        async with driven(fake, api="vllm") as case:
            assert not (await case.engine.start()).is_deployment
            await case.ask(max_tokens=3, ignore_eos=True)
            assert case.tokens("a") == fake.continuation(PROMPT, 3)
            assert not any("/load" in path for path in fake.paths)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    fake = fake_of()
    await fake.start()
    await fake.stop()
    with pytest.raises(Unavailable, match="no connection: connection refused"):
        async with driven(fake):
            pass


@pytest.mark.parametrize(
    "sent",
    [
        b"\x01\xff" * 4000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
    ],
    ids=["bytes", "header", "headers"],
)
async def test_what_does_not_speak_http_is_told_in_one_short_line(sent: bytes) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        server = EngineServer(url, config_of(url), (MODEL_NAME,), TextCodec(TOKENIZER))
        with pytest.raises(Unavailable, match="no HTTP answer") as caught:
            await server.check()
        await server.close()
        assert len(str(caught.value)) < 700
        assert str(caught.value).isprintable()


async def test_a_key_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    async with fake_of(key="secret") as fake, driven(fake, api_key_file=str(tmp_path / "key")) as case:
        assert (await case.ask()).finish_reason is FinishReason.LENGTH


async def test_a_shorter_context_of_the_server_counts() -> None:
    async with fake_of(context_length=64) as fake, driven(fake) as case:
        assert (await case.engine.start()).context_length == 64
        with pytest.raises(RequestError, match="must be < 64, the context length"):
            case.engine.submit(make_request("long", PROMPT * 20))


# -- hostile servers

HOSTILE = {
    "garbage": says(b"data: \xff\xfe{{{ not json\n\n"),
    "no event": says(b"<html>502 Bad Gateway</html>\n"),
    "another shape": says(b'data: {"choices": [{"text": 5}]}\n\n'),
    "text without ids": says(b'data: {"choices": [{"text": "hello"}]}\n\n'),
    "ids of no token": says(b'data: {"choices": [{"text": "", "token_ids": [99999999]}]}\n\n'),
    "negative ids": says(b'data: {"choices": [{"text": "", "token_ids": [-4]}]}\n\n'),
    "a huge line": says(b"data: " + b"x" * 20_000),
    "half a line": says(b'data: {"choices": [{"te', then_cut=True),
    "deep nesting": says(b'data: {"choices": [], "x": ' + b"[" * 3000 + b"\n\n"),
    "an error": says(b'data: {"error": {"message": "CUDA error", "code": 500}}\n\n'),
    "a cut": cut,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_broken_answer_fails_so_that_the_request_goes_elsewhere(name: str) -> None:
    async with fake_of() as fake, driven(fake) as case:
        fake.fault = after(4, HOSTILE[name])
        end = await case.ask(ignore_eos=True)
        assert end.error is not None
        assert end.error.code == "unavailable", "the server is well: the prompt is not why"
        assert case.tokens("a") == fake.continuation(PROMPT, 4), "what came before counts"
        fake.fault = None
        end = await case.ask("b")
        assert end.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("content", [b"", b": ping\n\n", b'data: {"choices": [{"token_ids": []}]}\n\n'])
async def test_silence_and_bytes_that_bring_no_token_end_an_answer(content: bytes) -> None:
    async def flood(server: FakeServer, response: web.StreamResponse, count: int) -> None:
        while True:
            await response.write(content)
            await asyncio.sleep(0.05)

    async with fake_of() as fake, driven(fake, limits={"silence_s": 1.0}) as case:
        fake.fault = after(3, flood)
        end = await case.ask()
        assert end.error is not None
        assert end.error.code == "unavailable"
        assert "no answer within 1 s" in end.error.message
        assert case.tokens("a") == fake.continuation(PROMPT, 3)
        await case.until(lambda: fake.open == 0)


@pytest.mark.parametrize("ending", ["cut", "hang", "garbage"])
async def test_what_goes_wrong_after_the_finish_reason_does_not_reach_the_client(ending: str) -> None:
    async def break_off(server: FakeServer, response: web.StreamResponse, count: int) -> None:
        last = server.eos_token_id
        await response.write(
            b'data: {"choices": [{"text": "", "token_ids": [%d], "finish_reason": "stop"}]}\n\n' % last
        )
        if ending == "garbage":
            await response.write(b"<html>\n")
        await asyncio.sleep(60 if ending == "hang" else 0.05)
        await cut(server, response, count)

    async with fake_of() as fake, driven(fake, limits={"silence_s": 30.0}) as case:
        fake.fault = after(3, break_off)
        end = await case.ask()
        assert end.error is None
        assert end.finish_reason is FinishReason.STOP
        assert case.tokens("a") == [*fake.continuation(PROMPT, 3), fake.eos_token_id]


@pytest.mark.parametrize(
    ("status", "headers", "kind", "retry_after_s"),
    [
        (400, {}, "invalid_request_error", None),
        (422, {}, "invalid_request_error", None),
        (429, {"Retry-After": "7"}, "overloaded", 7.0),
        (503, {"Retry-After": "soon"}, "overloaded", 1.0),
        (500, {}, "unavailable", None),
        (401, {}, "unavailable", None),
        (404, {}, "unavailable", None),
        (307, {"Location": "http://example.com"}, "unavailable", None),
    ],
)
async def test_statuses_become_errors(
    status: int, headers: dict[str, str], kind: str, retry_after_s: float | None
) -> None:
    async with fake_of() as fake, driven(fake) as case:
        text = '{"error": {"message": "the server says why"}}'
        fake.refuse = lambda: web.Response(status=status, headers=headers, text=text)
        error = (await case.ask()).error
        assert error is not None
        assert (error.code, error.retry_after_s) == (kind, retry_after_s)
        assert ("redirects to" if status == 307 else "the server says why") in error.message


# -- health


async def test_failed_requests_in_a_row_open_the_breaker_until_a_trial_succeeds() -> None:
    async with fake_of() as fake, driven(fake) as case:
        fake.fault = says(b"garbage\n")
        for name in "abc":
            await case.ask(name)
        await case.until(lambda: bool(case.problems))
        assert "no part of an answer" in str(case.problems[0])
        with pytest.raises(StepFailed, match="no part of an answer"):
            case.engine.submit(make_request("d"))
        await asyncio.sleep(0.3)
        assert case.problems[-1] is not None, "its health is fine, but its trials are not"
        fake.fault = None
        await case.until(lambda: case.problems[-1] is None)
        assert (await case.ask("e")).finish_reason is FinishReason.LENGTH


async def test_a_dead_server_fails_its_requests_and_comes_back() -> None:
    async with fake_of(token_s=0.01) as fake, driven(fake) as case:
        for number in range(4):
            case.engine.submit(make_request(f"r{number}", max_tokens=2000, ignore_eos=True))
        await case.until(lambda: len(case.deltas) == 4)
        await fake.stop()
        for number in range(4):
            end = await case.ends(f"r{number}")
            assert end.error is not None
            assert end.error.code == "step_failed"
        await case.until(lambda: bool(case.problems) and case.problems[-1] is not None)
        await fake.start()
        await case.until(lambda: case.problems[-1] is None)
        assert (await case.ask()).finish_reason is FinishReason.LENGTH


async def test_the_requests_of_a_silent_server_go_elsewhere_before_their_own_limit() -> None:
    limits = {"silence_s": 60.0}
    async with (
        fake_of(token_s=0.01) as fake,
        driven(fake, limits=limits, health={"interval_s": 0.05, "timeout_s": 0.5, "failures_max": 2}) as case,
    ):
        case.engine.submit(make_request("a", max_tokens=2000, ignore_eos=True))
        await case.until(lambda: "a" in case.deltas)
        fake.silent = True
        end = await case.ends("a")
        assert end.error is not None
        assert end.error.code == "step_failed"
        assert "no answer within 0.5 s" in end.error.message
        fake.silent = False
        await case.until(lambda: case.problems[-1] is None)


async def test_a_server_that_changes_its_model_gets_nothing() -> None:
    async with fake_of() as fake, driven(fake) as case:
        fake.model = "other"
        await case.until(lambda: bool(case.problems))
        assert "serves 'other', expected 'penstock-demo'" in str(case.problems[0])
        fake.model = MODEL_NAME
        await case.until(lambda: case.problems[-1] is None)


@pytest.mark.parametrize(
    "content", [b'{"data": ' + b"[" * 100_000, b"\xff\xfe", b"[]", b'{"data": [{"id": 5}]}']
)
async def test_a_list_of_models_that_is_none_is_a_problem(content: bytes) -> None:
    """Nothing that a server says ends the task that watches it, and with it the worker."""
    async with fake_of() as fake, driven(fake) as case:
        fake.models = content
        await case.until(lambda: bool(case.problems))
        assert "no list of models" in str(case.problems[0])
        fake.models = None
        await case.until(lambda: case.problems[-1] is None)


@pytest.mark.parametrize("length", [0, -1, -(10**30)])
async def test_a_context_length_below_one_is_none(length: int) -> None:
    async with fake_of(context_length=length) as fake, driven(fake) as case:
        assert (await case.engine.start()).context_length == SERVING.context_length


# -- load


@pytest.mark.parametrize(
    "metrics",
    [
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1\n' % ("9" * 5000),
        "vllm:num_requests_running 1\n" * 200_000,
    ],
    ids=["a long number", "many lines"],
)
async def test_a_server_serves_whatever_its_metrics_are(metrics: str) -> None:
    async with fake_of(metrics=metrics) as fake, driven(fake) as case:
        assert (await case.ask()).finish_reason is FinishReason.LENGTH
        assert case.engine.load().total_blocks == 0


async def test_metrics_tell_of_the_requests_of_others() -> None:
    metrics = (
        'vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n'
        'vllm:num_requests_running{model="m"} 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n'
    )
    async with fake_of(token_s=0.01, metrics=metrics) as fake, driven(fake) as case:
        assert (await case.engine.start()).total_blocks == 200
        assert case.engine.load().running_requests == 0
        fake.metrics = (
            "vllm:num_requests_running 5.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.5\n"
        )
        await case.until(lambda: case.engine.load().running_requests == 5)
        load = case.engine.load()
        assert (load.waiting_requests, load.active_blocks) == (2, 100)


@pytest.mark.parametrize("metrics", ["", "broken"], ids=["gone", "broken"])
async def test_load_that_is_told_no_more_is_forgotten_until_it_is_told_again(metrics: str) -> None:
    told = "vllm:num_requests_running 5.0\n"
    async with fake_of(metrics=told) as fake, driven(fake) as case:
        await case.until(lambda: case.engine.load().running_requests == 5)
        fake.metrics = metrics
        await case.until(lambda: case.engine.load().running_requests == 0)
        fake.metrics = told
        await case.until(lambda: case.engine.load().running_requests == 5)


async def test_more_requests_than_allowed_are_refused() -> None:
    serving = replace(SERVING, max_running_requests=2, max_waiting_requests=1)
    async with fake_of(token_s=0.01) as fake, driven(fake, serving) as case:
        for name in "abc":
            case.engine.submit(make_request(name, max_tokens=1000))
        with pytest.raises(Overloaded, match="3 requests"):
            case.engine.submit(make_request("d"))


# -- KV events


async def test_kv_events_of_the_server_are_those_of_its_steps(tmp_path: Path) -> None:
    """Events come as vLLM publishes them: a number, and its own hashes with the tokens."""
    zmq, zmq_asyncio = pytest.importorskip("zmq"), pytest.importorskip("zmq.asyncio")
    endpoint, tokens = f"ipc://{tmp_path}/events", list(range(5, 37))
    stored = {
        "type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": None, "token_ids": tokens, "block_size": 16,
        "medium": "GPU",
    }  # fmt: skip
    config = config_of("http://127.0.0.1:1", kv_events=endpoint)
    follow = followed(config, 0, card=ModelCard(name="", context_length=64, block_size=16, salt=b""))
    with zmq_asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.linger = 0
        publisher.bind(endpoint)
        assert follow is not None
        async with fake_of() as fake, driven(fake, replace(SERVING, follow=(follow,))) as case:
            assert (await case.engine.start()).kv_events
            number = 0
            while not case.events:
                payload = msgspec.msgpack.encode([0.0, [stored], 0])
                await publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
                number += 1
                await asyncio.sleep(0.01)
            (event,) = case.events[:1]
            assert isinstance(event, BlockStored)
            ours = block_hashes(pack_tokens(tokens), 16)[:, 0].tolist()
            assert hash_list(event.block_hashes) == ours


# -- prefill and decode servers


async def test_vllm_pairs_pass_kv_transfer_params_on() -> None:
    async with (
        fake_of() as first,
        fake_of() as second,
        driven(first, paired=True) as prefill,
        driven(second, paired=True) as decode,
    ):
        assert prefill.engine.kv_transfer_kind() == decode.engine.kv_transfer_kind() == "http-vllm-1"
        request = make_request("p", max_tokens=1)
        prefill.engine.submit(structs.replace(request, prefill_only=True))
        end = await prefill.ends("p")
        assert end.kv is not None
        assert not end.token_ids, "the decode server samples the first token"
        decode.engine.submit(structs.replace(make_request("d"), kv=end.kv))
        await decode.ends("d")
        assert decode.tokens("d") == second.continuation(PROMPT, 12)
        (params,) = second.pulled
        assert (params["do_remote_prefill"], params["remote_engine_id"]) == (True, first.url)


async def test_trtllm_pairs_pass_disaggregated_params_on() -> None:
    async with (
        fake_of("trtllm") as first,
        fake_of("trtllm") as second,
        driven(first, paired=True) as prefill,
        driven(second, paired=True) as decode,
    ):
        assert prefill.engine.kv_transfer_kind() == decode.engine.kv_transfer_kind() == "http-trtllm-1"
        prefill.engine.submit(structs.replace(make_request("p", max_tokens=1), prefill_only=True))
        end = await prefill.ends("p")
        assert end.kv is not None
        assert not end.token_ids, "the decode server sends the first token"
        decode.engine.submit(structs.replace(make_request("d"), kv=end.kv))
        await decode.ends("d")
        assert decode.tokens("d") == second.continuation(PROMPT, 12)
        (params,) = second.pulled
        assert params["first_gen_tokens"] == second.continuation(PROMPT, 1)
        assert params["encoded_opaque_state"] == "c3RhdGU="
        asked = structs.replace(make_request("l", max_tokens=1, logprobs=1), prefill_only=True)
        prefill.engine.submit(asked)
        end = await prefill.ends("l")
        assert (end.finish_reason, end.kv) == (FinishReason.LENGTH, None), (
            "the decode server computes it itself"
        )


async def test_trtllms_kv_events_are_polled() -> None:
    tokens = list(range(5, 21))
    ids = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    block = {"type": "stored_block", "block_hash": 7, "tokens": ids, "cache_level": 0, "priority": 35}
    stored = {"type": "stored", "parent_hash": None, "blocks": [block]}
    async with fake_of("trtllm") as fake:
        fake.kv_events = [{"event_id": 0, "window_size": 64, "data": stored}]
        config = config_of(fake.url, kv_events=f"{fake.url}/kv_cache_events")
        follow = followed(config, 0, card=ModelCard(name="", context_length=64, block_size=16, salt=b""))
        assert follow is not None
        async with driven(fake, replace(SERVING, follow=(follow,))) as case:
            await case.until(lambda: bool(case.events))
            (event,) = case.events
            assert isinstance(event, BlockStored)
            assert hash_list(event.block_hashes) == block_hashes(pack_tokens(tokens), 16)[:, 0].tolist()


async def test_sglang_pairs_meet_in_a_room_and_run_together() -> None:
    async with (
        fake_of("sglang", is_paired=True) as first,
        fake_of("sglang", is_paired=True) as second,
        driven(first, paired=True, bootstrap_port=9001) as prefill,
        driven(second, paired=True) as decode,
    ):
        first.rooms = second.rooms
        prefill.engine.submit(structs.replace(make_request("p", max_tokens=1), prefill_only=True))
        end = await prefill.ends("p")
        assert end.kv is not None
        assert first.open == 0, "the prefill waits for the decode server, and its handle does not"
        with pytest.raises(Overloaded, match="no prefill server has"):
            decode.engine.submit(make_request("alone"))
        decode.engine.submit(structs.replace(make_request("d"), kv=end.kv))
        await decode.ends("d")
        assert decode.tokens("d") == second.continuation(PROMPT, 12)
        (room,) = second.pulled
        assert (room["host"], room["port"]) == ("127.0.0.1", 9001)
        await prefill.until(lambda: prefill.engine.load().running_requests == 0)
        assert prefill.engine.load().failed_steps == 0
