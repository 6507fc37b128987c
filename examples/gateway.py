"""A gateway that proxies chats to plain OpenAI servers, and lets `penstock router` say to which.

penstock router
python examples/gateway.py http://127.0.0.1:8100 --port 8200 http://127.0.0.1:8001 http://127.0.0.1:8002
"""

import argparse
import json
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web


class Gateway:
    """Asks the router, forwards, and tells the router what came of it."""

    def __init__(self, router: str, servers: list[str]) -> None:
        self.router, self.servers = router, servers

    async def connect(self, _: web.Application) -> AsyncIterator[None]:
        """Tell the router of the servers: each of its models is a worker. Runs as long as the app does."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as self.http:
            for number, url in enumerate(self.servers, 1):
                async with self.http.get(f"{url}/v1/models") as answer:
                    models = [model["id"] for model in (await answer.json())["data"]]
                for model in models:
                    worker = {"url": url, "model": model}
                    name = f"server{number}-{model.replace('/', '-')}"
                    async with self.http.put(f"{self.router}/workers/{name}", json=worker) as answer:
                        answer.raise_for_status()
            yield

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve one chat, streamed or whole."""
        body = await request.read()
        asked, session = json.loads(body), request.headers.get("X-Session-Id")
        query = {"model": asked["model"], "messages": asked["messages"], "session": session}
        async with self.http.post(f"{self.router}/route", json=query) as answer:
            if (
                answer.status != 200
            ):  # no such model, or no server for it: the router says so in the API's words
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type="application/json"
                )
            choice = await answer.json()
        try:
            return await self.forward(request, body, choice)
        except aiohttp.ClientConnectorError as error:
            # A real one asks the router again, with "exclude": [choice["worker"]].
            return web.json_response({"error": {"message": f"{choice['worker']}: {error}"}}, status=502)
        finally:
            await self.tell(choice["id"], "finished")

    async def forward(self, request: web.Request, body: bytes, choice: dict) -> web.StreamResponse:
        url = f"{choice['url']}/v1/chat/completions"
        async with self.http.post(url, data=body) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            response.headers["X-Worker"] = choice["worker"]
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
            return response

    async def tell(self, request_id: str, stage: str, cached: int | None = None) -> None:
        feedback = {"id": request_id, "stage": stage, "cached_tokens": cached}
        async with self.http.post(f"{self.router}/feedback", json=feedback):
            pass  # one that is lost costs accuracy: the router gives the request up after a while


def cached_tokens(body: bytes) -> int | None:
    """Read from a whole answer how many prompt tokens the server had cached."""
    try:
        return json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    except (ValueError, KeyError, TypeError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("router")
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--port", type=int, default=8200)
    options = parser.parse_args()
    gateway = Gateway(options.router, options.servers)
    app = web.Application(client_max_size=8 << 20)
    app.cleanup_ctx.append(gateway.connect)
    app.add_routes([web.post("/v1/chat/completions", gateway.chat)])
    web.run_app(app, host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
