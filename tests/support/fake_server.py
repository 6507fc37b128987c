"""A server like vLLM, SGLang, TensorRT-LLM, llama.cpp, Ollama or a plain OpenAI one, with synthetic text and faults on demand.

The next token depends on the tokens before it (and on the seed) only, so an answer that goes on elsewhere is the same.
"""

import asyncio
import hashlib
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from tokenizers import Tokenizer

Fault = Callable[["FakeServer", web.StreamResponse, int], Awaitable[None]]
OWNERS = {
    "vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm", "llamacpp": "llamacpp", "ollama": "library", "text": "somebody",
    "penstock": "penstock",
}  # fmt: skip
_DATA = Path(__file__).parents[1] / "data"
_TRTLLM: dict[str, Any] = json.loads((_DATA / "trtllm" / "recorded.json").read_text())
_SGLANG: dict[str, Any] = json.loads((_DATA / "sglang" / "recorded.json").read_text())
_FAKE_HOST = "2.2.2.2"
"""SGLang's `FAKE_BOOTSTRAP_HOST`: such a request is answered without the other server."""
_NO_ROOM = b'data: {"error": {"message": "Invalid request: Disaggregated request received without bootstrap room id."}}\n\n'
"""What SGLang streams then."""


class FakeServer:
    """One server in this process's event loop. `start` gives its URL; `stop` cuts all its connections."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        api: str = "vllm",
        *,
        model: str = "penstock-demo",
        eos_token_id: int = 0,
        token_s: float = 0.0,
        context_length: int | None = 4096,
        eos_share: int = 0,
        is_paired: bool = False,
        port: int = 0,
    ) -> None:
        """Make a server.

        Args:
            tokenizer: of the model.
            api: what it speaks.
            model: its name for the model.
            eos_token_id: ends answers.
            token_s: seconds between two tokens.
            context_length: what `/v1/models` says.
            eos_share: one token in so many is the end, unless it is to be ignored; 0: none.
            is_paired: whether it is one of a pair; SGLang's then refuse requests without a room.
            port: where it listens; 0: any.
        """
        self.tokenizer, self.api, self.model = tokenizer, api, model
        self.token_s, self.context_length, self.eos_share = token_s, context_length, eos_share
        self.eos_token_id = eos_token_id
        self.is_paired = is_paired
        self.bodies: list[dict[str, Any]] = []
        """Bodies of all requests for answers, trials too."""
        self.paths: list[str] = []
        self.fault: Fault | None = None
        """Called before each token with (server, response, tokens so far)."""
        self.refuse: Callable[[], web.Response] | None = None
        """Makes the answer to every request, in place of tokens."""
        self.health_status = 200
        self.loading_checks = 0
        """Health checks that are answered as by a server that loads its model."""
        self.silent = False
        """Whether it accepts connections and answers nothing, as a stopped process does."""
        self.answer_s = 0.0
        """Seconds until anything is answered, as over a long way."""
        self.metrics = ""
        """Answer to `/metrics`; empty: 404, `broken`: 500."""
        self.told: dict[str, Any] = {}
        """What another deployment says of itself otherwise than it should, in its answer to `/load`."""
        self.load_queries: list[dict[str, str]] = []
        self.ports: set[int] = set()
        """Of clients, one for each TCP connection."""
        self.tls: ssl.SSLContext | None = None
        self.models: bytes | None = None
        """Answer to `/v1/models`; None: the model."""
        self.key: str | None = None
        self.open = self.aborted = 0
        self.rooms: dict[int, asyncio.Event] = {}
        """Where SGLang's two sides meet: one dict for all servers that transfer KV to each other."""
        self.prefills = 0
        """Prompts computed for other servers."""
        self.pulled: list[dict[str, Any]] = []
        """`kv_transfer_params` or rooms of the decode requests."""
        self.kv_events: list[dict[str, Any]] = []
        """What the next question for TensorRT-LLM's KV events is answered with."""
        self.publish: Callable[[dict[str, Any]], Awaitable[None]] | None = None
        """Called with the body of each request to SGLang, to publish KV events."""
        self.url = ""
        self._special = {n for n, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self._words = [
            n
            for n in range(tokenizer.get_vocab_size())
            if n not in self._special and tokenizer.decode([n]).isascii()
        ]
        self._runner: web.AppRunner | None = None
        self._port = port

    async def start(self) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.get("/metrics", self._metrics),
            web.get("/props", self._props),
            web.get("/load", self._load),
            web.post("/tokenize", self._tokenize),
            web.post("/kv_cache_events", self._events),
            web.post("/v1/completions", self._completions),
            web.post("/generate", self._generate),
            web.post("/completion", self._completion),
            web.post("/api/generate", self._ollama),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self.tls)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self._port}"
        return self.url

    async def stop(self) -> None:
        """Cut all connections, as the end of a process does; `start` listens at the same port again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for site in list(runner.sites):
                await site.stop()
            await _turns()  # those just accepted become connections
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()
            await _turns()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def next_token(self, token_ids: list[int], seed: object = None, *, ignore_eos: bool = True) -> int:
        digest = hashlib.blake2b(json.dumps([token_ids, seed]).encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        if self.eos_share and not ignore_eos and number % self.eos_share == 0:
            return self.eos_token_id
        return self._words[(number >> 16) % len(self._words)]

    def continuation(self, token_ids: list[int], count: int) -> list[int]:
        """What an answer to this prompt is, greedily."""
        known = list(token_ids)
        for _ in range(count):
            known.append(self.next_token(known))
        return known[len(token_ids) :]

    # -- what is no answer

    async def _gate(self, request: web.Request) -> None:
        if request.transport is not None:
            self.ports.add(request.transport.get_extra_info("peername")[1])
        await asyncio.sleep(self.answer_s)
        while self.silent:  # noqa: ASYNC110 - tests set it
            await asyncio.sleep(0.01)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized(text=json.dumps({"error": "Unauthorized"}))

    async def _health(self, request: web.Request) -> web.Response:
        await self._gate(request)
        if self.api == "ollama":
            raise web.HTTPNotFound
        if self.loading_checks:
            self.loading_checks -= 1
            return web.Response(status=503, text="Loading model")
        return web.Response(status=self.health_status, text="" if self.health_status == 200 else "not well")

    async def _models(self, request: web.Request) -> web.Response:
        await self._gate(request)
        if self.models is not None:
            return web.Response(body=self.models)
        card = {
            "id": self.model,
            "object": "model",
            "owned_by": OWNERS[self.api],
            "root": f"/models/{self.model}",
        }
        if self.context_length is not None and self.api in {"vllm", "sglang"}:
            card["max_model_len"] = self.context_length  # type: ignore[assignment]
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._gate(request)
        if not self.metrics:
            raise web.HTTPNotFound
        if self.metrics == "broken":
            raise web.HTTPInternalServerError
        return web.Response(text=self.metrics)

    async def _load(self, request: web.Request) -> web.Response:
        await self._gate(request)
        if self.api != "penstock":
            raise web.HTTPNotFound
        self.load_queries.append(dict(request.query))
        load = {"workers": 1, "block_size": 16, "total_blocks": 512}
        told = {"models": {self.model: load}, "region": "eu", "link_version": 1, "time_s": time.time()}
        return web.json_response(told | self.told)

    async def _props(self, _request: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": self.context_length}})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.api not in {"vllm", "sglang", "llamacpp"}:
            raise web.HTTPNotFound
        body = await request.json()
        text = body.get("content" if self.api == "llamacpp" else "prompt")
        if text is None:
            return web.json_response({"detail": "no text"}, status=422)
        return web.json_response({"tokens": self.tokenizer.encode(text, add_special_tokens=False).ids})

    # -- answers

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, ids = body["prompt"], isinstance(body["prompt"], list)
        if self.api == "trtllm" and (extra := _extra_of_trtllm(body)):
            return web.json_response({"message": f"Extra inputs are not permitted: {extra}"}, status=422)
        if self.api == "text" and ids:
            return web.json_response({"error": {"message": "prompt: must be a string"}}, status=400)
        gives_ids = (self.api in {"vllm", "penstock"} and body.get("return_token_ids")) or (
            self.api == "trtllm" and not body.get("detokenize", True)
        )
        if (disaggregated := body.get("disaggregated_params")) is not None:
            if disaggregated["request_type"] == "context_only":
                return await self._context(request, body)
            assert disaggregated["request_type"] == "generation_only"
            self.pulled.append(disaggregated)
        params = body.get("kv_transfer_params")
        if params and params.get("do_remote_decode"):
            return await self._prefill(request, body, params)
        if params:
            self.pulled.append(params)
        token_ids = prompt if ids else self.tokenizer.encode(prompt).ids
        limit, logprobs = body["max_tokens"], body.get("logprobs")
        if await self._meet(body, limit):
            return web.Response(body=_NO_ROOM, content_type="text/event-stream")

        def chunk(new: list[int], reason: str | None) -> dict[str, Any]:
            shown = [n for n in new if n not in self._special]
            choice: dict[str, Any] = {
                "index": 0, "text": "" if gives_ids and self.api == "trtllm" else self.tokenizer.decode(shown),
                "finish_reason": reason,
            }  # fmt: skip
            if gives_ids:
                choice["token_ids"] = new
            if logprobs is not None:
                choice["logprobs"] = {
                    "tokens": [f"token_id:{n}" for n in new],
                    "token_logprobs": [-0.5 for _ in new],
                    "top_logprobs": [
                        {f"token_id:{n}": -0.5}
                        | {f"token_id:{rank}": -1.0 - rank for rank in range(1, logprobs)}
                        for n in new
                    ],
                }
            return {"id": "c", "object": "text_completion", "model": self.model, "choices": [choice]}

        def usage(count: int) -> dict[str, Any]:
            return {
                "choices": [],
                "usage": {
                    "prompt_tokens": len(token_ids), "completion_tokens": count,
                    "total_tokens": count + len(token_ids), "prompt_tokens_details": {"cached_tokens": 7},
                },
            }  # fmt: skip

        return await self._stream(
            request, body, token_ids, limit, chunk, usage,
            ignore_eos=body.get("ignore_eos", False), stops=body.get("stop_token_ids", []), seed=body.get("seed"),
            sampled=body.get("temperature", 1.0) > 0, least=body.get("min_tokens", 0),
        )  # fmt: skip

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body["sampling_params"]
        extra = body.keys() - {*_SGLANG["generate_request"]} | params.keys() - {*_SGLANG["sampling_params"]}
        assert not extra, f"SGLang has no {extra}"
        if self.publish is not None:
            await self.publish(body)
        if await self._meet(body, params["max_new_tokens"]):
            return web.Response(body=_NO_ROOM, content_type="text/event-stream")
        all_ids: list[int] = []

        def chunk(new: list[int], reason: str | None) -> dict[str, Any]:
            all_ids.extend(new)
            meta = {
                "completion_tokens": len(all_ids), "prompt_tokens": len(body["input_ids"]), "cached_tokens": 5,
                "finish_reason": reason and {"type": reason},
            }  # fmt: skip
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [[-0.5, n, None] for n in all_ids]  # type: ignore[assignment]
                meta["output_top_logprobs"] = [  # type: ignore[assignment]
                    [
                        [-0.5, n, None],
                        *([-1.0 - rank, rank, None] for rank in range(1, body["top_logprobs_num"])),
                    ]
                    for n in all_ids
                ]
            return {"text": "", "output_ids": list(all_ids), "meta_info": meta}

        return await self._stream(
            request, body, body["input_ids"], params["max_new_tokens"], chunk, None,
            ignore_eos=params.get("ignore_eos", False), stops=params.get("stop_token_ids", []),
            seed=params.get("sampling_seed"), sampled=params["temperature"] > 0, least=params["min_new_tokens"],
        )  # fmt: skip

    async def _meet(self, body: dict[str, Any], limit: int) -> bool:
        """Wait for the other server of an SGLang pair; True where the request names no room, as it has to."""
        room, host = body.get("bootstrap_room"), body.get("bootstrap_host")
        if room is None:
            return self.is_paired and self.api == "sglang"
        if host != _FAKE_HOST and self.fault is None:
            peer = self.rooms.setdefault(room, asyncio.Event())
            if limit == 1:
                self.prefills += 1
                await peer.wait()  # until the decode server has come
            else:
                self.pulled.append({"room": room, "host": host, "port": body["bootstrap_port"]})
                peer.set()
        return False

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()

        def chunk(new: list[int], reason: str | None) -> list[dict[str, Any]]:
            parts: list[dict[str, Any]] = [
                {"index": 0, "content": "", "tokens": [n], "stop": False, "id_slot": 0, "tokens_predicted": 1}
                | ({"completion_probabilities": [{"id": n, "logprob": -0.5, "top_logprobs": [{"id": rank + n, "logprob": -0.5 - rank} for rank in range(body["n_probs"])]}]}
                   if body.get("n_probs") else {})
                for n in new
            ]  # fmt: skip
            if reason is not None:
                kind = "limit" if reason == "length" else "eos"
                parts.append(
                    {"content": "", "tokens": [], "stop": True, "stop_type": kind, "timings": {"cache_n": 3}}
                )
            return parts

        return await self._stream(
            request, body, body["prompt"], body["n_predict"], chunk, None, done=False,
            ignore_eos=body["ignore_eos"], seed=body.get("seed"), sampled=body["temperature"] > 0,
        )  # fmt: skip

    async def _ollama(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["raw"]
        token_ids = self.tokenizer.encode(body["prompt"]).ids

        def chunk(new: list[int], reason: str | None) -> list[dict[str, Any]]:
            text = self.tokenizer.decode([n for n in new if n not in self._special])
            parts: list[dict[str, Any]] = [{"model": self.model, "response": text, "done": False}]
            if reason is not None:
                parts.append({"model": self.model, "response": "", "done": True, "done_reason": reason})
            return parts

        return await self._stream(
            request, body, token_ids, body["options"]["num_predict"], chunk, None, prefix=b"", end=b"\n", done=False,
        )  # fmt: skip

    async def _prefill(
        self, request: web.Request, body: dict[str, Any], params: dict[str, Any]
    ) -> web.StreamResponse:
        self.bodies.append(body)
        self.paths.append(request.path)
        self.prefills += 1
        assert not body.get("stream")
        assert body["max_tokens"] == 1
        assert params["remote_engine_id"] is None
        given = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.url,
            "remote_block_ids": [[1, 2, 3]], "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
        }  # fmt: skip
        choice = {"index": 0, "text": "x", "token_ids": [5], "finish_reason": "length"}
        return web.json_response({"id": "p", "choices": [choice], "kv_transfer_params": given})

    async def _context(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answer a context-only request as `trtllm-serve`: its first token, and what a generation request needs."""
        await self._gate(request)
        self.bodies.append(body)
        self.paths.append(request.path)
        self.prefills += 1
        assert not body.get("stream"), "TensorRT-LLM streams no disaggregated_params"
        first = self.next_token(body["prompt"], ignore_eos=body.get("ignore_eos", False))
        params = dict.fromkeys(_TRTLLM["disaggregated_params"]) | {
            "request_type": "context_only", "first_gen_tokens": [first], "ctx_request_id": self.prefills,
            "encoded_opaque_state": "c3RhdGU=", "return_prompt_token_ids_b64": False,
        }  # fmt: skip
        reason = "stop" if first == self.eos_token_id else "length"
        choice = {
            "index": 0, "text": "", "token_ids": [first], "finish_reason": reason, "disaggregated_params": params,
        }  # fmt: skip
        return web.json_response({
            "id": "c", "model": self.model, "choices": [choice], "prompt_token_ids": body["prompt"],
            "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": len(body["prompt"]) + 1},
        })  # fmt: skip

    async def _events(self, request: web.Request) -> web.Response:
        await self._gate(request)
        if self.api != "trtllm":
            raise web.HTTPNotFound
        told, self.kv_events = self.kv_events, []
        if not told:
            await asyncio.sleep(0.05)
        return web.json_response(told)

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        token_ids: list[int],
        limit: int,
        chunk: Callable[[list[int], str | None], Any],
        usage: Callable[[int], Any] | None,
        *,
        ignore_eos: bool = False,
        stops: list[int] | None = None,
        seed: object = None,
        sampled: bool = False,
        least: int = 0,
        prefix: bytes = b"data: ",
        end: bytes = b"\n\n",
        done: bool = True,
    ) -> web.StreamResponse:
        await self._gate(request)
        self.bodies.append(body)
        self.paths.append(request.path)
        if self.refuse is not None:
            return self.refuse()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        known = list(token_ids)
        try:
            for count in range(limit):
                while self.silent:  # noqa: ASYNC110 - tests set it
                    await asyncio.sleep(0.01)
                if self.fault is not None:
                    await self.fault(self, response, count)
                new = self.next_token(
                    known, seed if sampled else None, ignore_eos=ignore_eos or count < least
                )
                known.append(new)
                has_stopped = (new == self.eos_token_id and not ignore_eos) or (
                    new in (stops or ()) and count >= least
                )
                reason = "stop" if has_stopped else "length" if count + 1 == limit else None
                made = chunk([new], reason)
                for part in made if isinstance(made, list) else [made]:
                    await response.write(prefix + json.dumps(part).encode() + end)
                if reason is not None:
                    break
                await asyncio.sleep(self.token_s)
            if usage is not None:
                await response.write(prefix + json.dumps(usage(len(known) - len(token_ids))).encode() + end)
            if done:
                await response.write(b"data: [DONE]\n\n")
            with suppress(ConnectionError):
                await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        finally:
            self.open -= 1
        return response


def _extra_of_trtllm(body: dict[str, Any]) -> set[str]:
    """Give the fields of a request that TensorRT-LLM forbids."""
    params = body.get("disaggregated_params") or {}
    return body.keys() - {*_TRTLLM["completion_request"]} | params.keys() - {*_TRTLLM["disaggregated_params"]}


async def _turns() -> None:
    """Let the loop turn until sockets and transports have done what they were told, however busy the machine is."""
    for _ in range(20):
        await asyncio.sleep(0.001)


async def cut(_server: FakeServer, response: web.StreamResponse, _count: int) -> None:
    """Close the connection at once."""
    transport = response._req.transport  # type: ignore[union-attr]
    if transport is not None:
        transport.abort()
    raise ConnectionResetError


def after(count: int, fault: Fault) -> Fault:
    """Do this before the token of this number, from 0."""

    async def later(server: FakeServer, response: web.StreamResponse, at: int) -> None:
        if at == count:
            await fault(server, response, at)

    return later


def says(content: bytes, *, then_cut: bool = False) -> Fault:
    """Write these bytes into the stream."""

    async def say(server: FakeServer, response: web.StreamResponse, at: int) -> None:
        await response.write(content)
        if then_cut:
            await asyncio.sleep(0.05)
            await cut(server, response, at)

    return say
