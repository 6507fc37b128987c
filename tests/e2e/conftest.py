"""Real deployments for e2e tests: processes, sockets, the openai client; each test checks that nothing is left."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from benchmarks.processes.served import Served, served
from penstock.core import log
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.graph import Graph

MODEL = "penstock-demo"


class Site:
    """A running deployment, with clients and faults."""

    def __init__(
        self, deployment: LocalDeployment | Served, http: aiohttp.ClientSession, said: list[str]
    ) -> None:
        self.deployment: Any = deployment
        self.url = deployment.url
        self.http = http
        self.said = said
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Get one frontend's view of the workers, by name."""
        async with self.http.get(f"{self.url}/admin/workers") as response:
            return {worker["name"]: worker for worker in (await response.json())["workers"]}

    async def ready_workers(self) -> int:
        usable = {"ready", "prefill_only"}
        return sum(worker["condition"] in usable for worker in (await self.workers()).values())

    async def load(self, name: str) -> dict[str, Any]:
        return (await self.workers())[name]["load"] or {}

    async def until(self, holds: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> float:
        """Poll until `holds` is true; returns the seconds it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.timeout(timeout_s):
            while not await holds():  # noqa: ASYNC110 - the state is in other processes
                await asyncio.sleep(0.01)
        return loop.time() - started

    async def stream(self, prompt: str, *, max_tokens: int, **options: Any) -> AsyncIterator[Any]:
        """Stream a chat's chunks, seeded and with exactly `max_tokens` tokens, so that equal requests give equal texts."""
        chunks = await self.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            **options,
        )
        async with chunks:
            async for chunk in chunks:
                yield chunk

    async def tell(self, prompt: str, *, max_tokens: int, **options: Any) -> tuple[str, Any]:
        """Stream a chat to its end; returns (text, usage)."""
        text, usage = "", None
        async for chunk in self.stream(prompt, max_tokens=max_tokens, **options):
            text += self.text_of(chunk)
            usage = chunk.usage or usage
        return text, usage

    @staticmethod
    def text_of(chunk: Any) -> str:
        return "".join(choice.delta.content or "" for choice in chunk.choices)

    def kill(self, name: str) -> None:
        os.kill(self.deployment.pids()[name], signal.SIGKILL)


Scenario = Callable[[Site], Awaitable[None]]


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Give the test private state and runtime directories, and check that nothing is left in them."""
    before = psutil.Process().children(
        recursive=True
    )  # children of other tests, such as a server that forks peers
    with tempfile.TemporaryDirectory(prefix="e2e-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path))
        log.configure("warning", process="supervisor")
        yield Path(name)
        assert list(Path(name).iterdir()) == []
        assert list(Path("/dev/shm").glob("*penstock*")) == []
        left = psutil.Process().children(recursive=True)
        assert [process for process in left if process not in before] == []


@pytest.fixture
def deploy(runtime_dir: Path) -> Callable[..., None]:
    """Give a function that runs a scenario against a deployment within `timeout_s`.

    By default it serves the demo model's tokenizer with mock engines; `fields` and `role` override the graph and its role.
    """

    def run(
        scenario: Scenario,
        *,
        workers: int = 1,
        frontends: int = 1,
        timeout_s: float = 180.0,
        role: dict[str, Any] | None = None,
        log_level: str = "warning",
        **fields: Any,
    ) -> None:
        roles = {"aggregated": {"replicas": workers, "engine": "mock"} | (role or {})}
        frontend = {"port": 0, "processes": frontends, "drain_timeout_s": 10}
        graph = Graph.model_validate(
            {"model": "demo", "frontend": frontend, "roles": roles, "supervision": {"spare_processes": 0}}
            | fields
        )

        async def main() -> None:
            async with asyncio.timeout(timeout_s), site_of(graph, log_level) as site:
                await scenario(site)

        asyncio.run(main())

    return run


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Callable[[Scenario], None]]:
    """Give a function that runs a scenario against one worker with the paged engine, float32 and steps of 64 tokens: its answers are the
    reference for other deployments.

    All tests of this process share it: no test may inject faults.
    """
    with tempfile.TemporaryDirectory(prefix="e2e-") as name, pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", name)
        environment.setenv("PENSTOCK_STATE_DIR", name)
        role = {
            "max_batch_tokens": 64,
            "weight_dtype": "float32",
        }  # float32, since cached prefixes of other tests change the rounding
        settings = (f"--set=roles.aggregated.{name}={value}" for name, value in role.items())
        with served("--demo", "--workers", "1", *settings) as deployment:
            environment.undo()

            def run(scenario: Scenario) -> None:
                async def main() -> None:
                    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
                        site = Site(deployment, http, [])
                        async with site.client:
                            await scenario(site)

                asyncio.run(main())

            yield run


@asynccontextmanager
async def site_of(graph: Graph, log_level: str = "warning") -> AsyncIterator[Site]:
    said: list[str] = []

    def say(name: str, state: str, detail: str) -> None:
        said.append(f"{name} {state} {detail}".strip())
        print(said[-1])  # shown if the test fails

    async with (
        LocalDeployment(graph, log_level=log_level, say=say) as deployment,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {deployment.admin_token}"}) as http,
    ):
        site = Site(deployment, http, said)
        async with site.client:
            wanted = sum(member.ready.is_set() for member in deployment.pool.members)

            async def all_known() -> bool:
                return await site.ready_workers() >= wanted

            await site.until(all_known)
            yield site
