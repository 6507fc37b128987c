"""One HTTP request on its way through Envoy: an endpoint is picked when its body is complete, and its answer is watched.

The protocol is that of the inference extension (docs/proposals/004-endpoint-picker-protocol there) over Envoy's
`envoy.service.ext_proc.v3`. Bodies may be sent as FULL_DUPLEX_STREAMED, as the extension has it, or BUFFERED.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import Overloaded, PenstockError, RequestError, Unavailable
from penstock.core.json_text import encode_json
from penstock.core.log import get_logger
from penstock.core.wire import TokenArray
from penstock.frontend.endpoint_picker import messages
from penstock.frontend.endpoint_picker.messages import BodyMode
from penstock.frontend.errors import ReceiveTimeoutError, error_answer
from penstock.frontend.limits.admission import ReceivedBytes
from penstock.frontend.prepare import THREAD_BYTES
from penstock.frontend.route_query import RouteModel, text_of
from penstock.router.fleet.member import Condition
from penstock.router.gateway import Query, RequestStage, tokens_of
from penstock.router.routing_service import RoutingService

_NO_PROMPT = "\n"
"""Routes requests without a prompt, such as GET /v1/models."""


class _Body(msgspec.Struct):
    """What chooses a server; what is right in the other fields is the server's concern."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int | str | list[int]] | None = None
    cache_salt: str | None = None


def query_of(
    body: bytes, models: list[str], tokenizing: RouteModel | None, exclude: tuple[str, ...]
) -> Query:
    """Read what chooses a server from a body. What this cannot read is routed by its bytes, and the server refuses it.

    Args:
        body: of any API, whole; empty where there is none.
        models: known names; a request that names no model may go to any.
        tokenizing: makes tokens of text for its model; None: text is matched by its bytes.
        exclude: names of servers not to choose.

    Raises:
        RequestError: no model is known, or a token id is no token id.
    """
    try:
        read = msgspec.json.decode(body, type=_Body) if body else _Body()
    except (ValueError, RecursionError):
        read = _Body(prompt=body.decode(errors="replace"))
    if not models:
        raise RequestError("no server is known yet", http_status=503)
    model = read.model or models[0]
    own = tokenizing if tokenizing is not None and model in tokenizing.names else None
    return Query(
        model=model, prompt=_prompt_of(read, own), cache_salt=read.cache_salt or None, exclude=exclude
    )


def _prompt_of(body: _Body, model: RouteModel | None) -> TokenArray | str:
    if body.messages is not None:
        try:
            return text_of(body.messages) if model is None else model.chat(body.messages)
        except (
            RequestError
        ):  # images, or what the template refuses: not what the server has cached, but the same each time
            return text_of(body.messages)
    prompt: str | int | list[int | str | list[int]] | list[int] | None = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # several prompts go to one server: the first stands for them
    if isinstance(prompt, list) and prompt:
        return tokens_of([number for number in prompt if isinstance(number, int)])
    if not isinstance(prompt, str) or not prompt:
        return _NO_PROMPT
    return prompt if model is None else model.prompt(prompt)


_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class PickedEndpoint:
    """An endpoint, `IP:PORT`, and the router's id of the request there."""

    id: str
    endpoint: str


class EndpointPicker:
    """Picks endpoints from the servers of a `RoutingService`. One event loop owns it."""

    def __init__(
        self, service: RoutingService, model: RouteModel | None, *, body_bytes_max: int, body_timeout_s: float
    ) -> None:
        """Pick from the servers that the service knows; `model` tokenizes text for its servers."""
        self._service = service
        self._model = model
        self.body_bytes_max = body_bytes_max
        self.body_timeout_s = body_timeout_s

    @property
    def is_ready(self) -> bool:
        """Whether some server may get requests."""
        return any(view.condition is Condition.READY for view in self._service.workers())

    async def pick(self, body: bytes, subset: frozenset[str] | None) -> PickedEndpoint:
        """Pick the endpoint for a request and count it there, until its final feedback.

        Args:
            body: of the request, whole.
            subset: endpoints to pick from; None: all.

        Raises:
            RequestError: the body is invalid, or no server has its model (404).
            Overloaded: too many requests are open.
            Unavailable: no server may get it.
        """
        views = self._service.workers()
        models = sorted({view.model for view in views})
        excluded = tuple(
            view.name for view in views if subset is not None and endpoint_of(view.address) not in subset
        )
        if subset is not None and len(excluded) == len(views):
            raise Unavailable(
                f"none of the {len(subset)} endpoints that the gateway allows is a server that is known here",
                retry_after_s=1.0,
            )
        if len(body) > THREAD_BYTES:
            query = await asyncio.to_thread(query_of, body, models, self._model, excluded)
        else:
            query = query_of(body, models, self._model, excluded)
        choice = self._service.route(query)
        return PickedEndpoint(choice.id, endpoint_of(choice.url))

    def feedback(
        self,
        pick: PickedEndpoint,
        stage: RequestStage,
        *,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Tell the router how far a request is; one that was silent for too long is not known any more."""
        with contextlib.suppress(RequestError):
            self._service.feedback(pick.id, stage, cached_tokens, output_tokens)


def endpoint_of(url: str) -> str:
    """Give `IP:PORT` of a server's URL, the IP of an IPv6 address in brackets."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS[parts.scheme]}"


ENDPOINT = "x-gateway-destination-endpoint"
_SERVED = "x-gateway-destination-endpoint-served"
_SUBSET = "x-gateway-destination-endpoint-subset"
_NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_TAIL_BYTES = 2048
"""Of an answer's end, where its usage stands."""
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')
_OUTPUT = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
_log = get_logger()


class EnvoyExchange:
    """Answers what Envoy says of one request, in order."""

    def __init__(self, picker: EndpointPicker) -> None:
        """Begin before Envoy's first message."""
        self._picker = picker
        self._received: ReceivedBytes | None = None
        self._limit: asyncio.Timeout | None = None
        self._dropped: Overloaded | None = None
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._subset: frozenset[str] | None = None
        self._request_mode: int = BodyMode.FULL_DUPLEX_STREAMED
        self._response_mode: int = BodyMode.FULL_DUPLEX_STREAMED
        self._has_picked = False
        self._pick: PickedEndpoint | None = None
        """None before, and after the final feedback."""
        self._status = 0
        self._tail = b""

    def drop(self, why: Overloaded) -> None:
        """Refuse the request for others; called while its body comes."""
        self._dropped = why
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def answers(self, requests: AsyncIterator[Any], received: ReceivedBytes) -> AsyncIterator[Any]:
        """Answer Envoy's messages until Envoy ends the stream, and tell the router how the request went.

        Args:
            requests: what Envoy says.
            received: counts the body's bytes in the receive budget.
        """
        self._received = received
        try:
            async with asyncio.timeout(self._picker.body_timeout_s) as self._limit:
                async for request in requests:
                    for answer in await self._answer(request):
                        yield answer
        except TimeoutError:
            yield _refusal(self._dropped or self._late())
        except PenstockError as error:
            yield _refusal(error)
        except Exception:  # noqa: BLE001 - the last handler of a request's errors
            _log.exception("endpoint_picker_failed")
            yield _refusal(PenstockError("the endpoint picker failed on this request; its log says more"))
        finally:
            self._finish()  # where Envoy ended the stream before the answer's end: its client went, or its server did

    def _late(self) -> PenstockError:
        return ReceiveTimeoutError(
            f"the body was not complete {self._picker.body_timeout_s:g} s after its headers; send it faster, or raise"
            " endpoint_picker.body_timeout_s"
        )

    async def _answer(self, request: Any) -> list[Any]:
        match request.WhichOneof("request"):
            case "request_headers":
                return await self._request_headers(request)
            case "request_body":
                return await self._request_body(request.request_body)
            case "request_trailers":
                answers = [] if self._has_picked else await self._choose_streamed()
                answers.append(messages.ProcessingResponse(request_trailers=messages.TrailersResponse()))
            case "response_headers":
                answers = [self._response_headers(request)]
            case "response_body":
                answers = [self._response_body(request.response_body)]
            case "response_trailers":
                answers = [messages.ProcessingResponse(response_trailers=messages.TrailersResponse())]
            case kind:
                _log.warning("endpoint_picker_message_unknown", kind=str(kind), effect="it is not answered")
                answers = []
        return answers

    async def _request_headers(self, request: Any) -> list[Any]:
        if request.HasField("protocol_config"):
            self._request_mode = request.protocol_config.request_body_mode
            self._response_mode = request.protocol_config.response_body_mode
        self._subset = _subset(request.metadata_context)
        if request.request_headers.end_of_stream or self._request_mode == BodyMode.NONE:
            pick = await self._choose()
            return [
                _at(
                    pick,
                    messages.ProcessingResponse(request_headers=_chosen(messages.HeadersResponse(), pick)),
                )
            ]
        if self._request_mode == BodyMode.FULL_DUPLEX_STREAMED:
            return []  # headers wait for the endpoint, and with them Envoy
        if self._request_mode == BodyMode.BUFFERED:
            return [messages.ProcessingResponse(request_headers=messages.HeadersResponse())]
        mode = (
            BodyMode(self._request_mode).name if self._request_mode in list(BodyMode) else self._request_mode
        )
        raise PenstockError(
            f"Envoy's processing_mode.request_body_mode is {mode}: an endpoint depends on the whole body; set it to"
            " FULL_DUPLEX_STREAMED or BUFFERED"
        )

    async def _request_body(self, body: Any) -> list[Any]:
        self._take(body.body)
        if not body.end_of_stream:
            return []
        if self._request_mode == BodyMode.FULL_DUPLEX_STREAMED:
            return await self._choose_streamed()
        pick = await self._choose()
        return [_at(pick, messages.ProcessingResponse(request_body=_chosen(messages.BodyResponse(), pick)))]

    def _take(self, piece: bytes) -> None:
        self._size_bytes += len(piece)
        if self._size_bytes > self._picker.body_bytes_max:
            raise RequestError(
                f"the body has more than {self._picker.body_bytes_max} bytes, the limit (body_bytes_max)",
                http_status=413,
            )
        if piece:
            assert self._received is not None, "set before the first message"
            self._received.take(len(piece))
            self._pieces.append(piece)

    async def _choose_streamed(self) -> list[Any]:
        """Pick, and give Envoy the headers and all of the body back."""
        pieces = self._pieces or [b""]
        pick = await self._choose()
        headers = messages.ProcessingResponse(request_headers=_chosen(messages.HeadersResponse(), pick))
        return [_at(pick, headers), *_streamed("request_body", pieces)]

    async def _choose(self) -> PickedEndpoint:
        assert self._received is not None, "set before the first message"
        assert self._limit is not None, "as well"
        if self._has_picked:
            raise RequestError("Envoy sent more of the request after its end")
        self._has_picked = True
        self._limit.reschedule(None)
        self._received.settle()
        self._pick = await self._picker.pick(b"".join(self._pieces), self._subset)
        self._pieces = []
        self._received.release()
        return self._pick

    def _response_headers(self, request: Any) -> Any:
        for header in request.response_headers.headers.headers:
            if header.key == ":status":
                text = header.raw_value.decode(errors="replace") or header.value
                self._status = int(text) if text.isdecimal() else 0
        served = _metadata(request.metadata_context, _NAMESPACE, _SERVED)
        if served is not None and self._pick is not None and served.string_value != self._pick.endpoint:
            self._finish(RequestStage.FAILED)  # the gateway took another endpoint
        elif request.response_headers.end_of_stream:
            self._finish()
        return messages.ProcessingResponse(response_headers=messages.HeadersResponse())

    def _response_body(self, body: Any) -> Any:
        if body.body:
            if not self._tail and self._pick is not None and not body.end_of_stream:
                self._picker.feedback(self._pick, RequestStage.FIRST_TOKEN)
            self._tail = (self._tail + body.body)[-_TAIL_BYTES:]
        if body.end_of_stream:
            self._finish()
        if self._response_mode != BodyMode.FULL_DUPLEX_STREAMED:
            return messages.ProcessingResponse(response_body=messages.BodyResponse())
        (answer,) = _streamed("response_body", [body.body], is_last=body.end_of_stream)
        return answer

    def _finish(self, stage: RequestStage | None = None) -> None:
        """Give the router the final feedback, once."""
        pick, self._pick = self._pick, None
        if pick is None:
            return
        is_failed = self._status >= HTTPStatus.INTERNAL_SERVER_ERROR
        self._picker.feedback(
            pick,
            stage or (RequestStage.FAILED if is_failed else RequestStage.FINISHED),
            cached_tokens=_last(_CACHED, self._tail),
            output_tokens=_last(_OUTPUT, self._tail),
        )


def _chosen(response: Any, pick: PickedEndpoint) -> Any:
    """Set the endpoint as a header; Envoy then chooses its route anew."""
    common = response.response
    common.clear_route_cache = True
    option = common.header_mutation.set_headers.add()
    option.header.key = ENDPOINT
    option.header.raw_value = pick.endpoint.encode()
    option.append_action = messages.OVERWRITE_IF_EXISTS_OR_ADD
    return response


def _at(pick: PickedEndpoint, answer: Any) -> Any:
    """Set the endpoint as metadata, which the protocol asks for beside the header."""
    answer.dynamic_metadata.fields[_NAMESPACE].struct_value.fields[ENDPOINT].string_value = pick.endpoint
    return answer


def _streamed(kind: str, pieces: list[bytes], *, is_last: bool = True) -> Iterator[Any]:
    for index, piece in enumerate(pieces):
        answer = messages.ProcessingResponse()
        streamed = getattr(answer, kind).response.body_mutation.streamed_response
        streamed.body = piece
        streamed.end_of_stream = is_last and index == len(pieces) - 1
        yield answer


def _refusal(error: PenstockError) -> Any:
    """Make Envoy answer its client with an error."""
    answer = messages.ProcessingResponse()
    refusal = answer.immediate_response
    refusal.status.code = error.http_status
    refusal.body = encode_json(error_answer(error))
    refusal.details = "penstock_endpoint_picker"
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    for key, value in headers.items():
        option = refusal.headers.set_headers.add()
        option.header.key = key
        option.header.raw_value = value.encode()
    return answer


def _subset(context: Any) -> frozenset[str] | None:
    """Read which endpoints the gateway allows; None: all."""
    value = _metadata(context, _SUBSET_NAMESPACE, _SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "string_value":
        return frozenset(part.strip() for part in value.string_value.split(",") if part.strip())
    return frozenset(one.string_value for one in value.list_value.values)


def _metadata(context: Any, namespace: str, key: str) -> Any | None:
    fields = context.filter_metadata.get(namespace)
    return None if fields is None or key not in fields.fields else fields.fields[key]


def _last(pattern: re.Pattern[bytes], tail: bytes) -> int | None:
    found = pattern.findall(tail)
    return int(found[-1]) if found else None
