"""`penstock router` as other gateways run it: its API by hand, and the example gateway over two plain OpenAI servers."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client import CollectorRegistry

from penstock.cli import main
from penstock.cli import router as router_command
from penstock.cli.router import RouterCommandConfig
from penstock.demo import MODEL_DIR
from penstock.deploy.state import load_admin_token
from penstock.deploy.supervisor.output import ProcessOutput
from penstock.frontend.http.router import RoutingHttpConfig, RoutingServer
from penstock.frontend.limits.keys import TenantConfig, hash_of
from penstock.frontend.limits.tenants import ApiAccess, TenantKeys
from penstock.router.routing_service import RoutingService
from tests.support.scenes import scenes

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60.0


class Api:
    """A running router, asked by hand."""

    def __init__(self, http: aiohttp.ClientSession, server: RoutingServer, host: str, port: int) -> None:
        self.http = http
        self.server = server
        self.port = port
        self.url = f"http://{host}:{port}"

    async def figure(self, name: str) -> float:
        async with self.http.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        async with self.http.request(method, self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def error(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        status, answer = await self.ask(method, path, body)
        return status, answer["error"]["message"]


def run(test: Callable[[Api], Awaitable[None]], access: ApiAccess | None = None, **fields: Any) -> None:
    async def run_scenario() -> None:
        config = RoutingHttpConfig(**{"port": 0, "body_bytes_max": 100_000} | fields)
        registry = CollectorRegistry()
        async with (
            asyncio.timeout(TIMEOUT_S),
            RoutingService(rng=random.Random(0), registry=registry) as service,
            aiohttp.ClientSession() as http,
        ):
            server = RoutingServer(service, config, registry, access)
            host, port = await server.start()
            try:
                await test(Api(http, server, host, port))
                service.check()
            finally:
                await server.close()

    asyncio.run(run_scenario())


api = scenes(run, 1)


@api()
async def test_the_api_from_put_to_feedback(api):
    for name in ("one", "two"):
        status, view = await api.ask("PUT", f"/workers/{name}", {"url": f"http://{name}:80", "model": "m"})
        assert (status, view["condition"], view["predicted"]) == (200, "ready", True)
    talk = [{"role": "system", "content": "Be brief. " * 50}, {"role": "user", "content": "Hello."}]
    status, choice = await api.ask("POST", "/route", {"model": "m", "messages": talk})
    assert status == 200
    assert choice["url"] == f"http://{choice['worker']}:80"
    assert choice.keys() == {"id", "worker", "url"}
    for stage in ("started", "first_token", "finished"):
        feedback = {"id": choice["id"], "stage": stage, "cached_tokens": 0}
        assert await api.ask("POST", "/feedback", feedback) == (200, {"id": choice["id"], "stage": stage})
    longer = [*talk, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Go on."}]
    why = {"X-Penstock-Explain": "1"}
    _, again = await api.ask("POST", "/route", {"model": "m", "messages": longer}, **why)
    (decision,) = again["why"]["decisions"]
    assert again["worker"] == choice["worker"] == decision["worker"] == decision["candidates"][0]["worker"]
    assert decision["candidates"][0]["tier_blocks"]["device"] >= 8
    for body in ({"prompt": "Once upon a time"}, {"token_ids": [1, 2, 3]}):
        assert (await api.ask("POST", "/route", {"model": "m", **body}))[0] == 200
    _, explained = await api.ask("GET", "/explain")
    assert [decision["request_id"] for decision in explained["decisions"]][:2] == [
        choice["id"],
        again["id"],
    ]
    _, explained = await api.ask("GET", f"/explain/{again['id']}")
    assert [{**one, "age_s": 0} for one in explained["decisions"]] == [{**decision, "age_s": 0}]
    _, explained = await api.ask("GET", "/explain?last=1")
    assert len(explained["decisions"]) == 1
    _, listed = await api.ask("GET", "/workers")
    assert sum(worker["open_requests"] for worker in listed["workers"]) == 3
    assert await api.ask("DELETE", "/workers/one") == (200, {"removed": "one"})
    assert (await api.ask("GET", "/health")) == (200, {"status": "ok"})
    async with api.http.get(f"{api.url}/metrics") as answer:
        assert "penstock_router_predicted_hit_tokens_total" in await answer.text()
    for path in (
        "/route",
        "/workers",
        "/metrics",
        "/health",
    ):  # a page of another site, by DNS rebinding or without
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            async with api.http.get(f"{api.url}{path}", headers=headers) as answer:
                assert answer.status == 403


@api()
async def test_who_is_refused_holds_no_place(api):
    await api.ask("PUT", "/workers/one", {"url": "http://one", "model": "m"})
    why = {"X-Penstock-Explain": "yes"}
    status, answer = await api.ask("POST", "/route", {"model": "m", "prompt": "a"}, **why)
    assert (status, "must be 1 or 0" in answer["error"]["message"]) == (400, True)
    _, listed = await api.ask("GET", "/workers")
    assert [worker["open_requests"] for worker in listed["workers"]] == [0]


@api()
async def test_several_models_and_adapters_at_once(api):
    for name, model, adapters in (("one", "m", ["sql"]), ("two", "m", []), ("three", "n", ["poems"])):
        server = {"url": f"http://{name}:80", "model": model, "adapters": adapters}
        assert (await api.ask("PUT", f"/workers/{name}", server))[0] == 200
    for model, expected in (
        ("m", {"one", "two"}),
        ("n", {"three"}),
        ("sql", {"one"}),
        ("poems", {"three"}),
    ):
        told = set()
        for number in range(6):
            status, choice = await api.ask(
                "POST", "/route", {"model": model, "prompt": f"{number} rivers " * 50}
            )
            assert status == 200
            told.add(choice["worker"])
        assert told == expected, model
    draining = {"url": "http://one:80", "model": "m", "state": "draining", "adapters": ["sql"]}
    await api.ask("PUT", "/workers/one", draining)
    assert (await api.error("POST", "/route", {"model": "sql", "prompt": "a"}))[0] == 503
    status, why = await api.ask(
        "POST", "/route", {"model": "m", "prompt": "a"}, **{"X-Penstock-Explain": "1"}
    )
    (decision,) = why["why"]["decisions"]
    assert (status, decision["worker"], decision["left_out"]) == (
        200,
        "two",
        [{"worker": "one", "why": "draining"}],
    )


BAD_ROUTES = [
    (b"{", 400, "the body"),
    (b"\xff", 400, "the body"),
    ([], 400, "the body: expected object, got array"),
    ({}, 400, "give one of token_ids, prompt and messages, got none"),
    ({"prompt": "a", "messages": []}, 400, "got prompt and messages"),
    ({"prompt": ""}, 400, "the prompt is empty"),
    ({"token_ids": [1, -1]}, 400, "from 0 to 2147483647, got -1"),
    ({"token_ids": [1 << 70]}, 400, "token_ids"),
    ({"prompt": "a", "modle": 1}, 400, "modle"),
    ({"prompt": "a", "session": "s" * 300}, 400, "session: must have"),
    ({"model": "n", "prompt": "a"}, 404, "model 'n': no worker has it; known: m"),
    ({"prompt": "a", "exclude": ["one"]}, 503, "none of its workers"),
    ({"prompt": "a" * 200_000}, 413, "larger than 100000 bytes; send less, or raise body_bytes_max"),
]
BAD_SERVERS = [
    ("two", {"url": "one:80"}, "url: must be http://HOST"),
    ("two", {"model": ""}, "model: must have a name"),
    ("two", {"total_blocks": 1 << 64}, "2147483647"),
    ("two", {"state": "dead"}, "state: must be one of 'ready', 'draining', 'asleep', got 'dead'"),
    ("n" * 200, {}, "name: must have"),
    ("a%0Ab", {}, r"printable characters only, got 'a\nb'"),
]
BAD_REQUESTS = [
    ("POST", "/feedback", {"id": "x", "stage": "finished"}, 404, "no request 'x' is open"),
    ("POST", "/feedback", {"id": "x", "stage": "done"}, 400, "stage: must be one of 'started', 'prefilled'"),
    ("POST", "/feedback", {"id": "x", "stage": "failed", "output_tokens": -1}, 400, "must be >= 0"),
    (
        "GET",
        "/explain?lsat=3",
        None,
        400,
        "'lsat' after the '?' of /explain is not known; expected last only",
    ),
    ("GET", "/explain/x", None, 404, "no decision about 'x' is known here"),
    ("GET", "/explain?last=0", None, 400, "last: must be 1 to 64, got '0'"),
    ("DELETE", "/workers/two", None, 404, "worker 'two' is not known; known: one"),
    ("GET", "/route", None, 405, "Method Not Allowed"),
    ("GET", "/nowhere", None, 404, "/nowhere does not exist"),
]


@api()
async def test_bad_input_gets_a_clear_answer(api):
    await api.ask("PUT", "/workers/one", {"url": "http://one", "model": "m"})
    for body, status, text in BAD_ROUTES:
        asked = {"model": "m"} | body if isinstance(body, dict) else body
        got, message = await api.error("POST", "/route", asked)
        assert (got, text in message) == (status, True), (body, message)
    for name, fields, text in BAD_SERVERS:
        server = {"url": "http://x", "model": "m"} | fields
        got, message = await api.error("PUT", f"/workers/{name}", server)
        assert (got, text in message) == (400, True), (fields, message)
    for method, path, body, status, text in BAD_REQUESTS:
        got, message = await api.error(method, path, body)
        assert (got, text in message) == (status, True), (path, message)


@api(ApiAccess(tenants=TenantKeys({"gateway": TenantConfig(keys=(hash_of("the-key"),))})))
async def test_an_api_key_is_asked_for_but_by_probes(api):
    for given in ({}, {"Authorization": "Bearer another"}):
        status, answer = await api.ask("GET", "/workers", **given)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        status, _ = await api.ask("POST", "/route", {"model": "m", "prompt": "a"}, **given)
        assert status == 401
    assert (await api.ask("GET", "/workers", Authorization="Bearer the-key"))[0] == 200
    assert (await api.ask("GET", "/health"))[0] == 200
    assert await api.figure("penstock_router_received_bytes") == 0


def test_an_open_router_that_others_reach_is_said(monkeypatch, tmp_path):
    def said(host: str) -> list[str]:
        """Start the command; the line that says it is ready ends it."""
        lines: list[str] = []

        class Said(ProcessOutput):
            def print(self, text: str, target: int = 1) -> None:
                lines.append(text.partition(" ")[2].strip())
                if lines[-1].startswith("ready"):
                    os.kill(os.getpid(), signal.SIGTERM)

        config = RouterCommandConfig(host=host, port=0, api_key_file=key_file)
        router_command.run_router(config, log_level="critical", output=Said())
        return [line for line in lines if line.startswith("warning")]

    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    key_file = None
    (warning,) = said("0.0.0.0")
    assert "answers whoever reaches it: no API key is set; give --api-key-file or PENSTOCK_API_KEY" in warning
    assert said("127.0.0.1") == []
    keys = tmp_path / "keys"
    keys.write_text(f"tenants: {{gateway: {{keys: ['{hash_of('the-key')}']}}}}")
    keys.chmod(0o600)
    key_file = str(keys)
    assert said("0.0.0.0") == []


DEMO = str(MODEL_DIR)
URL_AND_EVENTS = ["--url", "http://a", "--url", "http://b", "--kv-events", "tcp://a:1"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--port", "99999"], "--port: port: must be <= 65535"),
        (["--set", "receive.bytes_max=2000"], "body_bytes_max: must be <= receive.bytes_max"),
        (["--policy", "rondom"], "did you mean 'random'?"),
        (["--set", "service.router.queue.threshold_s=4"], "queue has no effect on the router alone"),
        (["--set", "service.router.no_worker_wait_s=4"], "service.router: no_worker_wait_s has no effect"),
        (["--url", "http://127.0.0.1:1"], "MODEL and either --url or --pool need each other"),
        ([DEMO, "--url", "ftp://x"], "must be like http://host:8000, got 'ftp://x'"),
        (["/no/such/model", "--url", "http://127.0.0.1:1"], "no such directory: /no/such/model"),
        ([DEMO, "--prefill-url", "http://a"], "add --decode-url"),
        ([DEMO, "--prefill-url", "http://a", "--decode-url", "http://a"], "http://a is named for two roles"),
        ([DEMO, "--url", "http://a", "--kv-events", "tcp://a"], "expected tcp://HOST:PORT or ipc://PATH"),
        ([DEMO, *URL_AND_EVENTS], "kv_events: must have one for each url, 2, got 1"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, text, capsys):
    assert main(["router", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


@contextlib.asynccontextmanager
async def process(ready: str, *arguments: str) -> AsyncIterator[str]:
    """Run a Python process until the block ends; gives the URL that its line `ready` has."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    assert running.stdout is not None
    try:
        async for line in running.stdout:
            if found := re.search(ready + r".*?(http://[\w.:]+)", line.decode()):
                yield found[1]
                break
        else:
            raise AssertionError(f"{arguments}: ended before it was ready")
    finally:
        if running.returncode is None:
            running.send_signal(signal.SIGTERM)
        await running.communicate()
        assert running.returncode == 0, f"{arguments}: ended with {running.returncode}"


@pytest.mark.slow
async def test_the_example_gateway_between_two_plain_servers(runtime_dir):
    mock = ("-m", "penstock", "serve", "--engine", "mock", "--mock-speedup", "50", "--port", "0")
    silent = (*mock, "--set", "worker.kv_events=false")
    example = str(ROOT / "examples" / "gateway.py")
    async with (
        asyncio.timeout(120),
        process("^penstock +ready", *silent) as first,
        process("^penstock +ready", *silent) as second,
        process("^router +ready", "-m", "penstock", "router", "--port", "0") as router,
        process("Running on", example, router, first, second, "--port", "0") as url,
        aiohttp.ClientSession() as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(content: str, model: str = "penstock-demo", **options: Any) -> Any:
            messages = [{"role": "user", "content": content}]
            return client.chat.completions.with_raw_response.create(model=model, messages=messages, **options)

        topics = [f"Topic {number}: " + f"tell me of the {number}th thing. " * 30 for number in range(6)]
        workers: dict[str, set[str]] = {}
        cached = 0
        for turn in range(3):
            for topic in topics:
                told = await ask(topic, max_tokens=4)
                workers.setdefault(topic, set()).add(told.headers["X-Worker"])
                if turn:
                    cached += told.parse().usage.prompt_tokens_details.cached_tokens
        assert all(len(names) == 1 for names in workers.values()), "a topic stays where it began"
        assert len(set.union(*workers.values())) == 2, "both servers are used"
        assert cached > 0
        stream = (await ask(topics[0], max_tokens=8, stream=True)).parse()
        assert len([chunk async for chunk in stream]) > 1
        with pytest.raises(openai.NotFoundError, match="no worker has it"):
            await ask("Hi", model="other")
        async with http.get(f"{router}/workers") as answer:
            assert [worker["open_requests"] for worker in (await answer.json())["workers"]] == [0, 0]
        admin = {"Authorization": f"Bearer {load_admin_token()}"}
        async with http.get(f"{first}/admin/workers", headers=admin) as answer:
            (worker,) = (await answer.json())["workers"]
        assert (worker["predicted"], worker["event_sequence"]) == (True, None), (
            "its own frontend guesses, too"
        )
        assert worker["indexed_blocks"] > 0
        async with http.get(f"{router}/metrics") as answer:
            text = await answer.text()
        for noun in ("predicted_hit_tokens_total", "predicted_hits_found_tokens_total"):
            (figure,) = re.findall(rf"^penstock_router_{noun} ([\d.]+)$", text, re.MULTILINE)
            assert float(figure) > 0, noun
