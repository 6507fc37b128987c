"""What an endpoint is picked by, and what Envoy's messages make of a request, without sockets."""

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import RequestError
from penstock.frontend.endpoint_picker import messages
from penstock.frontend.endpoint_picker.exchange import (
    ENDPOINT,
    EndpointPicker,
    EnvoyExchange,
    endpoint_of,
    query_of,
)
from penstock.frontend.endpoint_picker.messages import BodyMode
from penstock.frontend.limits.admission import ReceiveBudget, ReceiveMetrics
from penstock.router.gateway import GatewayServer
from penstock.router.routing_service import RoutingService

BODY = {"model": "m", "prompt": "Hello."}


def query(body: object, models: tuple[str, ...] = ("m",)) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return query_of(data, list(models), None, ())


def test_a_query_has_the_model_the_prompt_and_the_salt_of_the_body() -> None:
    chat = query(
        {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "cache_salt": "s", "top_k": 3}
    )
    assert chat.model == "m"
    assert chat.prompt == '{"role":"user","content":"Hi."}\n'
    assert chat.cache_salt == "s"
    assert query(BODY).prompt == "Hello."
    assert query({"model": "m", "prompt": ["one", "two"]}).prompt == "one"
    assert list(query({"model": "m", "prompt": [3, 4]}).prompt) == [3, 4]
    assert list(query({"model": "m", "prompt": [[5, 6], [7]]}).prompt) == [5, 6]


def test_what_is_no_such_body_goes_to_any_server() -> None:
    for body in (b"", b"{}", b"\xff\xfe{", b"[" * 100_000, b'{"prompt": 3}', {"prompt": []}, {"input": "x"}):
        assert query(body, ("a", "b")).model == "a"
    with pytest.raises(RequestError, match="no server is known yet"):
        query(BODY, ())


def test_endpoints_have_a_port_and_brackets_around_ipv6() -> None:
    assert endpoint_of("http://10.0.0.1:8000") == "10.0.0.1:8000"
    assert endpoint_of("https://[fd00::1]/v1") == "[fd00::1]:443"


def headers(
    *, end: bool = False, mode: int = BodyMode.FULL_DUPLEX_STREAMED, subset: str | list[str] | None = None
) -> Any:
    request = messages.ProcessingRequest()
    request.request_headers.end_of_stream = end
    request.protocol_config.request_body_mode = mode
    request.protocol_config.response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
    if subset is not None:
        hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": subset})
    return request


def body(data: bytes, *, end: bool = True) -> Any:
    return messages.ProcessingRequest(request_body=messages.HttpBody(body=data, end_of_stream=end))


def answered(status: int, *, served: str | None = None, end: bool = False) -> Any:
    request = messages.ProcessingRequest()
    header = request.response_headers.headers.headers.add()
    header.key, header.raw_value = ":status", str(status).encode()
    request.response_headers.end_of_stream = end
    if served is not None:
        request.metadata_context.filter_metadata["envoy.lb"].update(
            {"x-gateway-destination-endpoint-served": served}
        )
    return request


class Talk:
    """An exchange with two servers, 10.0.0.1 and 10.0.0.2."""

    def __init__(self, service: RoutingService) -> None:
        self.service = service
        self.budget = ReceiveBudget(1 << 20, ReceiveMetrics(CollectorRegistry(), "penstock_router"))

    async def say(self, *requests: Any) -> list[Any]:
        async def sent() -> AsyncIterator[Any]:
            for request in requests:
                yield request

        picker = EndpointPicker(self.service, None, body_bytes_max=1 << 16, body_timeout_s=60.0)
        exchange = EnvoyExchange(picker)
        with self.budget.hold(exchange.drop) as received:
            answers = [answer async for answer in exchange.answers(sent(), received)]
        assert not len(self.service.open), "the request is closed with its stream"
        assert not self.budget.size_bytes
        return answers


@asynccontextmanager
async def talking() -> AsyncIterator[Talk]:
    async with RoutingService(rng=random.Random(1)) as service:
        for number in (1, 2):
            await service.put(
                f"server-{number}", GatewayServer(url=f"http://10.0.0.{number}:8000", model="m")
            )
        yield Talk(service)


def picked(answer: Any) -> str:
    """Give the endpoint that an answer sets, as header and as metadata alike."""
    kind = answer.WhichOneof("response")
    (option,) = getattr(answer, kind).response.header_mutation.set_headers
    value = option.header.raw_value.decode()
    assert option.header.key == ENDPOINT
    assert answer.dynamic_metadata["envoy.lb"][ENDPOINT] == value
    return str(value)


DATA = json.dumps(BODY).encode()


async def test_a_streamed_body_waits_for_its_end_and_is_given_back() -> None:
    async with talking() as talk:
        first, *rest = await talk.say(headers(), body(DATA[:5], end=False), body(DATA[5:]))
        assert picked(first) in {"10.0.0.1:8000", "10.0.0.2:8000"}
        streamed = [one.request_body.response.body_mutation.streamed_response for one in rest]
        assert [(one.body, one.end_of_stream) for one in streamed] == [(DATA[:5], False), (DATA[5:], True)]


async def test_a_body_that_ends_with_trailers_is_whole() -> None:
    async with talking() as talk:
        trailers = messages.ProcessingRequest(request_trailers=messages.HttpTrailers())
        first, given, last = await talk.say(headers(), body(DATA, end=False), trailers)
        assert picked(first)
        assert given.request_body.response.body_mutation.streamed_response.body == DATA
        assert last.WhichOneof("response") == "request_trailers"


async def test_only_endpoints_that_the_gateway_allows_are_picked() -> None:
    async with talking() as talk:
        for subset in (["10.0.0.2:8000"], "10.0.0.2:8000,10.9.9.9:1"):
            for _ in range(4):
                (answer, _) = await talk.say(headers(subset=subset), body(DATA))
                assert picked(answer) == "10.0.0.2:8000"
        for subset in ([], "10.9.9.9:1"):
            (answer,) = await talk.say(headers(subset=subset), body(DATA))
            assert answer.immediate_response.status.code == 503


async def test_another_endpoint_than_the_picked_one_releases_the_request() -> None:
    async with talking() as talk:
        await talk.say(headers(), body(DATA), answered(200, served="10.9.9.9:1"))


async def test_modes_without_the_whole_body_are_refused() -> None:
    async with talking() as talk:
        (answer,) = await talk.say(headers(mode=BodyMode.STREAMED))
        assert answer.immediate_response.status.code == 500
        assert b"request_body_mode is STREAMED" in answer.immediate_response.body


def anything(rng: random.Random) -> Any:
    """Make a message that may come at the wrong time, and may hold nonsense."""
    mode = rng.choice([BodyMode.NONE, BodyMode.BUFFERED, BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED])
    makers: list[Callable[[], Any]] = [
        lambda: headers(end=rng.random() < 0.3, mode=mode),
        lambda: body(rng.randbytes(rng.randrange(40)), end=rng.random() < 0.5),
        lambda: body(DATA[: rng.randrange(len(DATA) + 1)]),
        lambda: body(b"x" * 70_000),
        lambda: answered(rng.choice([0, 200, 404, 500, 99_999]), end=rng.random() < 0.3),
        lambda: messages.ProcessingRequest(response_body=messages.HttpBody(body=rng.randbytes(9))),
        lambda: messages.ProcessingRequest(response_trailers=messages.HttpTrailers()),
        lambda: messages.ProcessingRequest(request_trailers=messages.HttpTrailers()),
        messages.ProcessingRequest,
    ]
    return rng.choice(makers)()


async def test_messages_in_any_order_end_in_answers() -> None:
    """Nothing is left open, and no exception but a refusal comes out, whatever a broken Envoy says."""
    rng = random.Random(3)
    async with talking() as talk:
        for _ in range(1000):
            for answer in await talk.say(*(anything(rng) for _ in range(rng.randrange(1, 8)))):
                assert b"its log says more" not in answer.immediate_response.body
        talk.service.check()
