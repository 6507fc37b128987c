"""Processes of two releases in one deployment: neighbours work together while it is upgraded, others are refused with both versions.

There is no release with another wire version yet: besides the last release, processes run whose wire version the tests change.
"""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import aiohttp
import pytest

from benchmarks.chaos.load import Frontend, Load
from penstock.core.wire import WIRE_VERSION
from penstock.deploy.identity import SECRET_VARIABLE
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from tests.support.host import ADMIN_TOKEN, until
from tests.support.registries import Etcd, free_port
from tests.support.releases import last_release, with_wire_version
from tests.support.up import Up

pytestmark = [pytest.mark.slow, pytest.mark.needs("etcd")]
STREAMS, REQUESTS_BETWEEN = 4, 24
STEP_TIMEOUT_S = 90.0


class Parts:
    """Parts of one deployment, each under a supervisor of its own."""

    def __init__(self, folder: Path, stack: ExitStack, registry: str) -> None:
        """Start nothing yet; what is started ends with `stack`."""
        self._folder = folder
        self._stack = stack
        self._registry = registry

    def make(self, name: str, python: Path | str | None = None) -> Up:
        """Make a part's user, whose commands `python` runs."""
        folder = self._folder / name
        folder.mkdir()
        runtime_dir = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-"))
        part = Up(folder, Path(runtime_dir))
        part.python = part.python if python is None else python
        part.environment |= {
            "PENSTOCK_HOST": name,
            SECRET_VARIABLE: "a secret of the test",
            ADMIN_TOKEN_VARIABLE: ADMIN_TOKEN,
        }
        self._stack.callback(part.end)
        part.graph(
            name="releases",
            runtime={"discovery": "etcd", "urls": [self._registry]},
            roles={"aggregated": {"engine": "mock", "mock": {"speedup": 2}}},
        )
        return part

    def up(self, name: str, run: str, python: Path | str | None = None) -> Up:
        """Start a part, and wait until it is ready."""
        part = self.make(name, python)
        part.up("graph.yaml", "--run", run)
        return part


@pytest.fixture
def parts(tmp_path) -> Iterator[Parts]:
    with ExitStack() as stack:
        etcd = Etcd()
        etcd.start()
        stack.callback(etcd.kill)
        yield Parts(tmp_path, stack, etcd.url)


def workers(url: str) -> dict[str, str]:
    """Give the condition of each worker that a frontend sees, by name."""
    request = Request(f"{url}/admin/workers", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
    with urlopen(request, timeout=10) as answer:
        return {each["name"]: each["condition"] for each in json.load(answer)["workers"]}


def metric(url: str, name: str) -> float:
    """Give the sum of a metric's series; 0 where nobody listens yet."""
    try:
        with urlopen(f"{url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except URLError:
        return 0
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param("the last release and this version", marks=pytest.mark.nightly),
        "this version and the next wire version",
    ],
)
def test_a_deployment_is_upgraded_part_by_part_under_streams(parts, tmp_path, pair):
    if pair.startswith("the last"):
        old, new = last_release(tmp_path), None
    else:
        old, new = None, with_wire_version(tmp_path, WIRE_VERSION + 1)
    counts: Counter[str] = Counter()
    problems: list[str] = []

    async def keep_asking(load: Load, session: aiohttp.ClientSession) -> None:
        while True:
            outcome = await load.put(session, 2 * STREAMS, STREAMS)
            counts.update(outcome.counts)
            problems.extend(outcome.problems)

    async def more_requests() -> None:
        aim = counts["completed"] + REQUESTS_BETWEEN
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while counts["completed"] < aim and not problems:  # noqa: ASYNC110 - the load counts
                await asyncio.sleep(0.1)
        assert problems == []

    async def sees(frontend: Frontend, *names: str) -> None:
        wanted = dict.fromkeys(names, "ready")
        await asyncio.to_thread(until, lambda: workers(frontend.url) == wanted)

    async def scenario() -> None:
        up = lambda *arguments: asyncio.to_thread(parts.up, *arguments)  # noqa: E731
        first = await up("host-a", "frontend,aggregated", old)
        second = await up("host-b", "aggregated", old)
        frontends = [Frontend(first.url)]
        await sees(frontends[0], "worker-1@host-a", "worker-1@host-b")
        load = Load(frontends, output_tokens=100, prompts=8, seed=1)
        async with aiohttp.ClientSession() as session:
            frontends.append(frontends[0])
            await load.learn(session)
            frontends.pop()
            asking = asyncio.create_task(keep_asking(load, session))
            await more_requests()
            third = await up("host-c", "aggregated", new)  # an old frontend, a new worker beside old ones
            await sees(frontends[0], "worker-1@host-a", "worker-1@host-b", "worker-1@host-c")
            await more_requests()
            await asyncio.to_thread(second.end)
            await sees(frontends[0], "worker-1@host-a", "worker-1@host-c")
            fourth = await up("host-d", "frontend", new)  # a new frontend, an old worker beside a new one
            frontends.append(Frontend(fourth.url))
            await sees(frontends[1], "worker-1@host-a", "worker-1@host-c")
            await more_requests()
            del frontends[0]  # as a load balancer before it would
            await asyncio.to_thread(first.end)
            await sees(frontends[0], "worker-1@host-c")
            await more_requests()
            asking.cancel()
            await asyncio.wait((asking,))
            assert asking.cancelled()
        for part in (third, fourth):
            await asyncio.to_thread(part.end)

    asyncio.run(scenario())
    assert set(counts) == {"completed"}, (counts, problems)


def test_releases_that_are_too_far_apart_are_refused_with_both_versions(parts, tmp_path):
    far = with_wire_version(tmp_path, WIRE_VERSION + 2)
    ours, url = parts.make("host-a"), f"http://127.0.0.1:{free_port()}"
    ours.start("up", "graph.yaml", "--run", "frontend", "--set", f"frontend.port={url.rpartition(':')[2]}")
    until(lambda: metric(url, "penstock_runtime_registry_connected") == 1)
    theirs = parts.up("host-b", "aggregated", far)  # nobody of another release is registered yet
    said = f"wire version: the worker speaks {WIRE_VERSION + 2}, this process {WIRE_VERSION}"
    assert said in ours.wait("registration_refused")
    name = 'penstock_runtime_registrations_refused_total{reason="version"}'
    until(lambda: metric(url, name) == 1)
    assert workers(url) == {}
    late = parts.make("host-c")
    process = late.start("up", "graph.yaml", "--run", "aggregated")
    late.wait(rf"^penstock: etcd at .*{said} and its neighbours")
    assert process.wait(timeout=STEP_TIMEOUT_S) != 0
    theirs.end()
    again = parts.up("host-d", "aggregated")
    until(lambda: workers(url) == {"worker-1@host-d": "ready"})
    again.end()
