"""Routes that a model answers, of every API: whole or streamed answers, and tokens."""

from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from penstock.core.errors import PenstockError, RequestError
from penstock.frontend.anthropic.events import MESSAGES
from penstock.frontend.frontend import Frontend, PendingAnswer
from penstock.frontend.http.access_log import line_of_request
from penstock.frontend.http.heads import Heads
from penstock.frontend.http.replies import json_response, unexpected
from penstock.frontend.http.sse_response import SseResponse
from penstock.frontend.limits.admission import Slot
from penstock.frontend.limits.headers import RequestOptions, read_options
from penstock.frontend.openai.answers import encode
from penstock.frontend.openai.dialect import Dialect
from penstock.frontend.requests.dialects import CHAT, COMPLETIONS, COUNT_TOKENS, TOKENIZE
from penstock.frontend.responses.bodies import DeletedResponse
from penstock.frontend.responses.events import RESPONSES
from penstock.frontend.tenants.tenants import Tenant
from penstock.frontend.tokens.bodies import Detokenized, Tokenized
from penstock.frontend.tracing import TracedRequest, traced_request

_GENERATING = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


class GenerationRoutes:
    """Handlers of one `Frontend`'s APIs."""

    def __init__(self, frontend: Frontend, tenant: Callable[[], Tenant], heads: Heads) -> None:
        """Make them; `tenant` gives that of the request being handled, `heads` makes the heads of answers."""
        self._heads = heads
        self._frontend = frontend
        self._config = frontend.config
        self._tenant = tenant

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, partial(self._generate, dialect)) for path, dialect in _GENERATING.items()),
            web.get("/v1/responses/{id}", self._show_response),
            web.delete("/v1/responses/{id}", self._delete_response),
            web.post("/v1/messages/count_tokens", self._count_tokens),
            web.post("/v1/embeddings", self._embed),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _generate(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        response: SseResponse | None = None
        try:
            with self._frontend.arrive() as slot, slot.limit():
                pending = await self._prepare(request, slot, dialect)
                if not pending.stream:
                    answer = pending.whole_answer()
                    await pending.completion.run(answer.take, gathers=True)
                    return self._heads.whole(request, await pending.body(answer))
                response = SseResponse(request, pending, self._config, self._heads)
                with response.kept_alive():
                    await pending.completion.run(response.take, writer=response)
                await response.finish()
        except ConnectionError:
            raise
        except Exception as error:
            if response is None or not response.prepared:
                raise  # nothing was sent yet: the error gets its HTTP status
            await response.fail(error if isinstance(error, PenstockError) else unexpected(request))
        return response

    async def _show_response(self, request: web.Request) -> web.Response:
        if request.query.get("stream") in {"true", "1"}:
            raise RequestError("stream: a kept answer is given whole; leave it out", param="stream")
        options = read_options(request.headers, self._config, self._tenant())
        kept = self._frontend.response(options.tenant, request.match_info["id"])
        return json_response(kept.response)

    async def _delete_response(self, request: web.Request) -> web.Response:
        response_id = request.match_info["id"]
        options = read_options(request.headers, self._config, self._tenant())
        self._frontend.forget_response(options.tenant, response_id)
        return json_response(encode(DeletedResponse(id=response_id)))

    async def _prepare(self, request: web.Request, slot: Slot, dialect: Dialect) -> PendingAnswer:
        """Receive and prepare a request; it counts as in flight once its body is complete."""
        frontend = self._frontend
        with frontend.budget.hold(slot.end) as received:
            frontend.region_links.forwarded(request.headers)
            options = read_options(request.headers, self._config, self._tenant())
            traced = TracedRequest.begin(request.path, options, frontend.dispatcher)
            if traced is not None:
                traced_request.set(traced)
                options = traced.carried(options)
            body = await frontend.bodies.read(request, received)
            frontend.admit(slot, self._tenant())
            pending = await frontend.generate(body, slot, options, dialect)
        if (line := line_of_request.get()) is not None:
            line.generates(pending, options)
        if traced is not None:
            traced.pending = pending
        return pending

    async def _embed(self, request: web.Request) -> web.Response:
        with self._frontend.arrive() as slot:
            body, options = await self._receive(request, slot)
            with slot.limit():
                pending = await self._frontend.embed(body, slot, options)
                if (line := line_of_request.get()) is not None:
                    line.generates(pending, options)
                await pending.completion.run()
                return json_response(await pending.completion.body())

    async def _count_tokens(self, request: web.Request) -> web.Response:
        tokens, _ = await self._tokens(request, COUNT_TOKENS)
        return json_response(encode({"input_tokens": len(tokens)}))

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens, context_length = await self._tokens(request, TOKENIZE)
        return json_response(encode(Tokenized(len(tokens), context_length, tokens)))

    async def _tokens(self, request: web.Request, dialect: Dialect) -> tuple[list[int], int]:
        """Give the tokens of a body's prompt, and the model's context length."""
        frontend = self._frontend
        with frontend.arrive() as slot:
            body, options = await self._receive(request, slot)
            with slot.limit():
                tokens, model = await frontend.tokenize(body, slot, options, dialect)
            return tokens, model.card.context_length

    async def _detokenize(self, request: web.Request) -> web.Response:
        with self._frontend.arrive() as slot:
            body, _ = await self._receive(request, slot)
            with slot.limit():
                return json_response(encode(Detokenized(await self._frontend.detokenize(body))))

    async def _receive(self, request: web.Request, slot: Slot) -> tuple[Sequence[bytes], RequestOptions]:
        options = read_options(request.headers, self._config, self._tenant())
        with self._frontend.budget.hold(slot.end) as received:
            with slot.limit():
                body = await self._frontend.bodies.read(request, received)
            self._frontend.admit(slot, self._tenant())
        return body, options
