"""Two tenants before the same workers: what one sends at once makes itself wait, and hardly the other."""

import asyncio
import functools
import random
from pathlib import Path

import numpy as np
import pytest

from penstock.core.ids import RequestId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import PackedHashes, PackedTokens
from penstock.graph import Overrides, load
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.cluster import SimCluster
from penstock.sim.deployment import SALT, plan_deployment
from penstock.sim.loop import run
from penstock.sim.report import make_report
from penstock.sim.simulate import simulate
from penstock.sim.workload import SimPrompt, WorkloadConfig, make_sessions

GRAPH = Path(__file__).parents[3] / "examples" / "graphs" / "8b-h100-x8.yaml"
TOKENS = 8_000
FLOOD, QUIET = 300, 15
pytestmark = pytest.mark.slow


def ttfts_s(
    *settings: str,
    flood: int = FLOOD,
    tokens: int = TOKENS,
    adapters: int = 0,
    quiet: int = QUIET,
    rate_per_s: float = 1.0,
    before: int = 1,
) -> dict[str, list[float]]:
    """Have one tenant send so many prompts at once, for so many adapters, and another one a prompt a second; give what each waits.

    The other one has sent some before, one after the other.
    """
    names = [f"adapter-{number}" for number in range(adapters)]
    listed = [f"roles.aggregated.adapters=[{', '.join(names)}]"] if adapters else []
    graph = load(GRAPH, Overrides(["roles.aggregated.replicas=2", *listed, *settings]))
    deployment = plan_deployment(graph, beside=GRAPH.parent)
    streams: dict[RequestId, SimPrompt] = {}
    waits_s: dict[str, list[float]] = {"flood": [], "quiet": []}

    async def ask(dispatcher: Dispatcher, tenant: str, number: int) -> None:
        loop, request_id = asyncio.get_running_loop(), RequestId(f"{tenant}-{number}")
        size = tokens if tenant == "flood" else TOKENS
        prompt = streams[request_id] = SimPrompt(len(streams))
        hashes = prompt.block_hashes(graph.block_size, 0, size // graph.block_size)
        request = Request(
            request_id=request_id,
            model=graph.model,
            token_ids=PackedTokens(bytes(4 * size)),
            sampling=SamplingParams(max_tokens=8, ignore_eos=True),
            block_hashes=PackedHashes(hashes.tobytes()),
            salt=SALT,
            tenant=tenant,
            adapter=names[number % adapters] if adapters and tenant == "flood" else None,
        )
        sent_s, first_s = loop.time(), None
        async with dispatcher.open(request) as stream:
            async for _ in stream:
                first_s = first_s or loop.time()
        assert first_s is not None
        waits_s[tenant].append(first_s - sent_s)

    async def main(rng: random.Random) -> None:
        async with SimCluster(deployment.cluster_spec(streams), rng) as cluster:
            for number in range(2):
                await cluster.start(f"worker-{number}")
            dispatchers = cluster.dispatchers
            for dispatcher in dispatchers:
                await dispatcher.serving()
            await asyncio.sleep(1.0)
            for number in range(before):
                await ask(dispatchers[0], "quiet", number)
            async with asyncio.TaskGroup() as group:
                for number in range(flood):
                    group.create_task(ask(dispatchers[number % len(dispatchers)], "flood", number))
                for number in range(before, quiet):
                    await asyncio.sleep(rng.expovariate(rate_per_s))
                    group.create_task(ask(dispatchers[number % len(dispatchers)], "quiet", number))
            for dispatcher in dispatchers:
                dispatcher.check()

    run(main, 1)
    assert (len(waits_s["flood"]), len(waits_s["quiet"])) == (flood, quiet)
    return waits_s


LARGE_QUEUE = "router.queue.requests_max=100000", "router.open_requests_max=100000"


@functools.cache
def alone_p99_s() -> float:
    return float(np.percentile(ttfts_s(flood=0, quiet=45)["quiet"], 99))


def test_the_report_says_what_each_tenant_waits() -> None:
    """Nine parts of a load of twice what two workers can do are one tenant's; the other one asks for less than its share."""
    config = WorkloadConfig(
        requests=300, rate_per_s=20.0, input_tokens=TOKENS, output_tokens=8, tenants={"flood": 9, "quiet": 1}
    )
    waits_s = {}
    for threshold in ("2", "null"):
        settings = ["roles.aggregated.replicas=2", f"router.queue.threshold_s={threshold}"]
        deployment = plan_deployment(load(GRAPH, Overrides(settings)), beside=GRAPH.parent)
        recording = simulate(deployment, make_sessions(config, random.Random(1)), seed=1)
        report = make_report(recording, deployment, None, wall_s=1.0)
        tenants = report["tenants"]
        assert list(tenants) == ["flood", "quiet"]
        assert sum(of["requests"] for of in tenants.values()) == report["requests"] == 300
        assert sum(of["failed"] for of in tenants.values()) == report["failed"] == 0
        for share in ("prompt_token_share", "output_token_share"):
            assert tenants["quiet"][share] == pytest.approx(0.1, abs=0.04)
            assert sum(of[share] for of in tenants.values()) == pytest.approx(1.0)
        waits_s[threshold] = {name: of["ttft_s"]["mean"] for name, of in tenants.items()}
        assert tenants["quiet"]["ttft_s"]["p50"] <= tenants["quiet"]["ttft_s"]["p99"]
    held, sent = waits_s["2"], waits_s["null"]
    for waits in (held, sent):
        assert waits["quiet"] < waits["flood"] / 4, (
            "who asks for less than its share does not wait for the other"
        )
    assert held["flood"] < 1.2 * sent["flood"]


@pytest.mark.parametrize(
    ("tokens", "adapters"),
    [
        (TOKENS, 40),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((1_000, 0), (1_000, 1), (1_000, 40), (TOKENS, 0), (32_000, 0))
        ),
    ],
)
def test_a_flood_moves_anothers_p99_little_however_many_adapters_it_asks_for(
    tokens: int, adapters: int
) -> None:
    """A flood that two workers need 45 s for, beside another's prompts of 0.18 s each.

    A worker computes the other tenant's prompt before what is left of the flood's.
    """
    waits_s = ttfts_s(*LARGE_QUEUE, flood=4_000_000 // tokens, tokens=tokens, adapters=adapters, quiet=45)
    assert np.percentile(waits_s["quiet"], 99) < 1.25 * alone_p99_s()


@pytest.mark.nightly
def test_a_flood_that_begins_is_not_ahead_of_a_tenant_that_asks_all_the_time() -> None:
    waits_s = ttfts_s(*LARGE_QUEUE, flood=12, tokens=32_000, quiet=30, before=25, rate_per_s=4.0)
    assert max(waits_s["quiet"][25:]) < 2 * alone_p99_s(), "each prompt of the flood takes more than a second"


@pytest.mark.parametrize("tokens", [TOKENS, pytest.param(32_000, marks=pytest.mark.nightly)])
def test_a_flood_over_two_frontends_moves_anothers_p90_little(tokens: int) -> None:
    """Not its p99: a frontend that knew the flood alone has filled the workers with it before the other's first request."""
    waits_s = ttfts_s(
        *LARGE_QUEUE, "frontend.processes=2", flood=4_000_000 // tokens, tokens=tokens, quiet=45
    )
    assert np.percentile(waits_s["quiet"], 90) < 1.5 * alone_p99_s()
