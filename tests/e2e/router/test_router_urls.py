"""`penstock router MODEL --url ...`: running servers are workers of the router alone while they serve."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.cli import main
from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import InstanceState, Role
from penstock.demo import MODEL_DIR
from penstock.deploy.processes.watched_servers import WatchedServers
from penstock.engine.openai.config import ServerConfig
from penstock.router.service.gateway import Choice, Query, Stage
from penstock.router.service.routing_service import RoutingService
from tests.support.fake_server import FakeServer
from tests.support.scenes import scenes

TIMEOUT_S = 30.0
TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
HEALTH = {"interval_s": 0.05, "timeout_s": 1.0, "retry_s_max": 0.1, "failures_max": 2}


class Site:
    """The router's service over fake servers."""

    def __init__(
        self, service: RoutingService, servers: list[FakeServer], said: list[tuple[str, ...]]
    ) -> None:
        self.service = service
        self.servers = servers
        self.said = said

    def condition(self, name: str) -> str:
        return {view.name: view.condition for view in self.service.workers()}.get(name, "unknown")

    def problem(self, name: str) -> str | None:
        return next(view.problem for view in self.service.workers() if view.name == name)

    def ask(self, *exclude: str) -> Choice:
        return self.service.route(Query(model="penstock-demo", prompt="Hello there.", exclude=exclude))

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():  # noqa: ASYNC110 - the fleet and sockets have no event for it
            await asyncio.sleep(0.01)


def run(
    test: Callable[[Site], Awaitable[None]], *, before: Callable[[list[FakeServer]], None] | None = None
) -> None:
    async def scenario() -> None:
        servers, said = [FakeServer(TOKENIZER), FakeServer(TOKENIZER, "sglang")], []
        for server in servers:
            await server.start()
        if before is not None:
            before(servers)
        config = ServerConfig(url=tuple(s.url for s in servers), health=HEALTH, load_interval_s=0.05)
        async with asyncio.timeout(TIMEOUT_S), RoutingService(rng=random.Random(0)) as service:
            watched = WatchedServers(
                service,
                {Role.AGGREGATED: config},
                model="penstock-demo",
                model_dir=MODEL_DIR,
                say=lambda *words: said.append(words),
            )
            watching = asyncio.ensure_future(watched.run())
            try:
                await test(Site(service, servers, said))
                service.check()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                for server in servers:
                    await server.stop()

    asyncio.run(scenario())


site = scenes(run, 1)


@site()
async def test_a_server_that_goes_gets_no_requests_until_it_is_back(site):
    await site.until(lambda: site.condition("server-1") == site.condition("server-2") == "ready")
    assert {site.ask().worker for _ in range(8)} == {"server-1", "server-2"}
    await site.servers[0].stop()
    await site.until(lambda: site.condition("server-1") == "unhealthy")
    assert "connection refused" in str(site.problem("server-1"))
    assert {site.ask().worker for _ in range(8)} == {"server-2"}
    with pytest.raises(Unavailable):
        site.ask("server-2")
    await site.servers[0].start()
    await site.until(lambda: site.condition("server-1") == "ready")
    assert site.ask("server-2").url == site.servers[0].url
    life = ["ready", "unhealthy", "ready"]
    await site.until(lambda: [state for name, state, _ in site.said if name == "server-1"] == life)


def test_a_server_of_another_model_or_without_health_is_never_named():
    def before(servers: list[FakeServer]) -> None:
        servers[0].model = "llama"
        servers[1].health_status = 500

    async def test(site: Site) -> None:
        await site.until(lambda: len(site.said) == 2)
        assert {name: state for name, state, _ in site.said} == {"server-1": "failed", "server-2": "failed"}
        assert "serves 'llama', expected" in next(why for name, _, why in site.said if name == "server-1")
        with pytest.raises(RequestError, match="no worker has it"):
            site.ask()
        site.servers[0].model = "penstock-demo"
        await site.until(lambda: site.condition("server-1") == "ready")
        assert site.ask().worker == "server-1"

    run(test, before=before)


@site()
async def test_failures_that_the_gateway_tells_open_the_breaker_and_a_good_trial_closes_it(site):
    await site.until(lambda: site.condition("server-1") == site.condition("server-2") == "ready")
    refuse = site.servers[0].refuse
    from aiohttp import web

    site.servers[0].refuse = lambda: web.json_response({"error": {"message": "no"}}, status=500)
    for stage in (Stage.FAILED, Stage.FINISHED, Stage.FAILED, Stage.FAILED):
        assert site.condition("server-1") == "ready"
        site.service.feedback(site.ask("server-2").id, stage)
    await site.until(lambda: site.condition("server-1") == "unhealthy")
    assert "feedback says failed (2 requests in a row failed)" in str(site.said)
    assert site.ask().worker == "server-2"
    site.servers[0].refuse = refuse
    await site.until(lambda: site.condition("server-1") == "ready")


def test_requests_of_other_clients_count_as_load():
    def before(servers: list[FakeServer]) -> None:
        servers[0].metrics = "vllm:num_requests_running 50\nvllm:num_requests_waiting 9\n"

    async def test(site: Site) -> None:
        def load() -> dict[str, Any]:
            return next((v.load or {} for v in site.service.workers() if v.name == "server-1"), {})

        await site.until(
            lambda: load().get("running_requests") == 50 and site.condition("server-2") == "ready"
        )
        assert load()["waiting_requests"] == 9
        assert {site.ask().worker for _ in range(8)} == {"server-2"}
        view = next(v for v in site.service.workers() if v.name == "server-1")
        assert view.state is InstanceState.READY

    run(test, before=before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "MODEL and either --url or --pool need each other"),
        ([str(MODEL_DIR)], "MODEL and either --url or --pool need each other"),
        ([str(MODEL_DIR), "--url", "ftp://x"], "must be like http://host:8000, got 'ftp://x'"),
        (["/no/such/model", "--url", "http://127.0.0.1:1"], "no such directory: /no/such/model"),
        ([str(MODEL_DIR), "--prefill-url", "http://a"], "add --decode-url"),
        ([str(MODEL_DIR), "--decode-url", "http://a"], "add --prefill-url"),
        (
            [str(MODEL_DIR), "--prefill-url", "http://a", "--decode-url", "http://a"],
            "http://a is named for two roles",
        ),
        (
            [str(MODEL_DIR), "--url", "http://a", "--kv-events", "tcp://a"],
            "'tcp://a': expected tcp://HOST:PORT or ipc://PATH",
        ),
        (
            [str(MODEL_DIR), "--url", "http://a", "--url", "http://b", "--kv-events", "tcp://a:1"],
            "kv_events: must have one for each url, 2, got 1",
        ),
        (
            [
                str(MODEL_DIR),
                "--url",
                "http://a",
                "--set",
                "service.router.disagg.local_tokens_max=0",
            ],
            "has no effect without --prefill-url",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["router", "--port", "0", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
