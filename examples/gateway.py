"""A gateway that proxies chats to plain OpenAI servers, and lets `penstock router` say to which.

penstock router
python examples/gateway.py http://127.0.0.1:8100 --port 8200 http://127.0.0.1:8001 http://127.0.0.1:8002
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

FAILURES = (aiohttp.ClientError, TimeoutError)
LIMITS = aiohttp.ClientTimeout(total=600, sock_connect=5)


class PrefillError(aiohttp.ClientError):
    """The prefill server did not answer."""


class Gateway:
    """Asks the router, forwards, and tells the router what came of it."""

    def __init__(self, router: str, servers: list[str]) -> None:
        self.router, self.servers = router, servers

    async def register(self) -> None:
        """Tell the router of the servers: each of its models is a worker."""
        async with aiohttp.ClientSession(timeout=LIMITS, raise_for_status=True) as http:
            for number, url in enumerate(self.servers, 1):
                async with http.get(f"{url}/v1/models") as answer:
                    models = [model["id"] for model in (await answer.json())["data"]]
                for model in models:
                    worker = {"url": url, "model": model}
                    place = f"{self.router}/workers/server{number}-{model.replace('/', '-')}"
                    async with http.put(place, json=worker):
                        pass

    async def connect(self, _: web.Application) -> AsyncIterator[None]:
        """Keep connections to all of them, as long as the app runs."""
        async with aiohttp.ClientSession(timeout=LIMITS) as self.http:
            yield

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve one chat, streamed or whole."""
        body = await request.read()
        try:
            asked, session = json.loads(body), request.headers.get("X-Session-Id")
            query = {"model": asked["model"], "messages": asked["messages"], "session": session}
        except (ValueError, KeyError, TypeError) as error:
            return refusal(400, f"the body: expected JSON with model and messages: {error!r}")
        try:
            async with self.http.post(f"{self.router}/route", json=query) as answer:
                if (
                    answer.status != 200
                ):  # no such model, or no server for it: the router says so in the API's words
                    said = await answer.read()
                    return web.Response(status=answer.status, body=said, headers=passed_on(answer))
                choice = await answer.json()
        except FAILURES as error:
            return refusal(503, f"the router {self.router} does not answer: {error!r}; try again later")
        response, stage, failed = web.StreamResponse(), "finished", None
        try:
            await self.answer(request, response, asked, choice)
        except FAILURES as error:
            if response.prepared:  # it has begun, and must not end as if it were whole
                if request.transport is not None:
                    request.transport.abort()
                return response
            # A real one asks the router again, with "exclude": [failed].
            stage = "failed"
            failed = choice["prefill"]["worker"] if isinstance(error, PrefillError) else choice["worker"]
            return refusal(502, f"{failed} does not answer: {error!r}; try again")
        finally:
            await self.tell(choice["id"], stage, worker=failed)
        return response

    async def answer(
        self, request: web.Request, response: web.StreamResponse, asked: dict, choice: dict
    ) -> None:
        """Have the worker answer, and before or meanwhile its prefill server, if it has one, compute the prompt."""
        asked, first = asked | choice.get("fields", {}), choice.get("prefill")
        if first is None:
            await self.forward(request, response, asked, choice)
        elif first["from_answer"]:
            prefilled = await self.prefill(first, asked)
            await self.tell(choice["id"], "prefilled")
            asked |= {name: prefilled.get(name) for name in first["from_answer"]}
            await self.forward(request, response, asked, choice)
        else:
            await asyncio.gather(self.prefill(first, asked), self.forward(request, response, asked, choice))

    async def prefill(self, first: dict, asked: dict) -> dict:
        place = f"{first['url']}/v1/chat/completions"
        try:
            async with self.http.post(place, json=asked | first["fields"], raise_for_status=True) as answer:
                return await answer.json()
        except FAILURES as error:
            raise PrefillError(str(error)) from error

    async def forward(
        self, request: web.Request, response: web.StreamResponse, asked: dict, choice: dict
    ) -> None:
        async with self.http.post(f"{choice['url']}/v1/chat/completions", json=asked) as answer:
            response.set_status(answer.status)
            response.headers.update({**passed_on(answer), "X-Worker": choice["worker"]})
            await response.prepare(request)
            last, is_first = b"", True
            async for chunk in answer.content.iter_any():
                if is_first:
                    await self.tell(choice["id"], "first_token")
                    is_first = False
                last = chunk
                await response.write(chunk)
            if answer.content_type == "application/json":
                await self.tell(choice["id"], "first_token", cached_tokens(last))
            await response.write_eof()

    async def tell(
        self, request_id: str, stage: str, cached: int | None = None, worker: str | None = None
    ) -> None:
        """Give feedback; what is lost of it costs accuracy: the router gives the request up after a while."""
        feedback = {"id": request_id, "stage": stage, "cached_tokens": cached, "worker": worker}
        with contextlib.suppress(*FAILURES):
            async with self.http.post(f"{self.router}/feedback", json=feedback):
                pass


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def passed_on(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in ("Content-Type", "Retry-After") if name in answer.headers}


def cached_tokens(body: bytes) -> int | None:
    """Read from a whole answer how many prompt tokens the server had cached."""
    try:
        return json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    except (ValueError, KeyError, TypeError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("router")
    parser.add_argument("servers", nargs="*", help="none where the router has --url")
    parser.add_argument("--port", type=int, default=8200)
    options = parser.parse_args()
    gateway = Gateway(options.router.rstrip("/"), [server.rstrip("/") for server in options.servers])
    try:
        asyncio.run(gateway.register())
    except (*FAILURES, ValueError, LookupError) as error:
        sys.exit(f"gateway: the router and all servers have to be there: {type(error).__name__}: {error}")
    app = web.Application(client_max_size=8 << 20)
    app.cleanup_ctx.append(gateway.connect)
    app.add_routes([web.post("/v1/chat/completions", gateway.chat)])
    web.run_app(app, host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
