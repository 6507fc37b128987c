"""The router alone: servers come and go, prompts find their prefix, requests end by feedback or by silence."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from penstock.core.errors import Overloaded, RequestError, Unavailable
from penstock.core.types.instances import InstanceState, Role
from penstock.router.config import RouterConfig
from penstock.router.fleet.prices import UNKNOWN
from penstock.router.gateway import GatewayServer, Query, RequestStage, ServerChoice, ServerKvTransfer
from penstock.router.routing_service import RoutingService, RoutingServiceConfig
from penstock.router.servers import Watched
from penstock.sim.loop import run_virtual
from tests.support.scenes import scenes

A, B = GatewayServer(url="http://a", model="m"), GatewayServer(url="http://b", model="m")
TOKENS = np.arange(100, dtype=np.int32)
LONG = "You are a helpful assistant. " * 20

Scene = Callable[[RoutingService], Awaitable[None]]


def run_scenario(scene: Scene, **config: object) -> None:
    async def main() -> None:
        settings = RoutingServiceConfig.parse({"block_size": 4, **config}, source="test")
        async with RoutingService(rng=random.Random(1), config=settings) as service:
            await service.put("a", A)
            await service.put("b", B)
            await scene(service)
            service.check()

    run_virtual(main())


scenario = scenes(run_scenario, 1)


def ask(service: RoutingService, prompt: object = TOKENS, **fields: object) -> tuple[str, str]:
    choice = service.route(Query(model="m", prompt=prompt, **fields))
    return choice.worker, choice.id


def cached_blocks(service: RoutingService, choice: ServerChoice) -> int:
    (explanation,) = service.explain(choice.id)
    assert explanation.chosen.worker == choice.worker
    assert (
        max(candidate.overlap_blocks for candidate in explanation.candidates)
        == explanation.chosen.overlap_blocks
    )
    return explanation.chosen.overlap_blocks


@pytest.mark.parametrize("prompt", [TOKENS, LONG], ids=["tokens", "text"])
@scenario()
async def test_a_prefix_goes_where_it_went(service, prompt):
    first, request_id = ask(service, prompt)
    service.feedback(request_id, RequestStage.FINISHED)
    for _ in range(5):
        choice = service.route(Query(model="m", prompt=prompt))
        assert choice.worker == first
        assert choice.url == f"http://{first}"
        assert cached_blocks(service, choice) == len(prompt) // (4 if prompt is TOKENS else 16)
        service.feedback(choice.id, RequestStage.FINISHED)


@scenario()
async def test_what_is_open_counts_as_load_until_its_first_token_and_its_end(service):
    def load() -> tuple[int, int]:
        return (
            sum(view.reserved_prefill_tokens for view in service.workers()),
            sum(view.reserved_blocks for view in service.workers()),
        )

    first, one = ask(service)
    second, two = ask(service, TOKENS[::-1].copy())
    assert {first, second} == {"a", "b"}
    assert load() == (200, 50)
    service.feedback(one, RequestStage.STARTED)
    assert load() == (200, 50)
    service.feedback(one, RequestStage.FIRST_TOKEN)
    service.feedback(one, RequestStage.FIRST_TOKEN)
    assert load() == (100, 50)
    service.feedback(one, RequestStage.FINISHED, cached_tokens=7)
    service.feedback(two, RequestStage.FINISHED)
    assert load() == (0, 0)
    with pytest.raises(RequestError, match=r"no request .* is open") as caught:
        service.feedback(one, RequestStage.FINISHED)
    assert caught.value.http_status == 404


@scenario(silence_s=10.0)
async def test_silence_ends_a_request_and_word_of_it_puts_that_off(service):
    _, silent = ask(service)
    _, told = ask(service)
    await asyncio.sleep(8)
    service.feedback(told, RequestStage.STARTED)
    service.check()
    await asyncio.sleep(4)
    service.check()
    with pytest.raises(RequestError, match="silent for 10 s"):
        service.feedback(silent, RequestStage.FINISHED)
    service.feedback(told, RequestStage.STARTED)
    await asyncio.sleep(11)
    assert sum(view.open_requests for view in service.workers()) == 0


@scenario()
async def test_servers_drain_move_and_go(service):
    first, request_id = ask(service)
    other = "b" if first == "a" else "a"
    servers = {"a": A, "b": B}
    draining = GatewayServer(url=servers[first].url, model="m", state=InstanceState.DRAINING)
    assert (await service.put(first, draining)).condition == "draining"
    assert ask(service)[0] == other
    assert (await service.put(first, servers[first])).condition == "ready"
    assert ask(service)[0] == first, "it still has the prefix"
    moved = await service.put(first, GatewayServer(url="http://elsewhere", model="m"))
    assert moved.indexed_blocks == 0, "another server, which holds nothing"
    service.feedback(request_id, RequestStage.FINISHED)
    await service.remove(first)
    await service.remove(other)
    with pytest.raises((RequestError, Unavailable)):
        ask(service)
    with pytest.raises(RequestError, match="'a' is not known; known: none"):
        await service.remove("a")


@scenario(router=RouterConfig(open_requests_max=3, workers_max=2).model_dump())
async def test_refusals(service):
    with pytest.raises(RequestError, match="model 'n': no worker has it; known: m"):
        service.route(Query(model="n", prompt=TOKENS))
    for empty in ("", TOKENS[:0]):
        with pytest.raises(RequestError, match="prompt is empty"):
            ask(service, empty)
    for prompt, said in (
        (np.array([5, -1], dtype=np.int32), "got -1"),
        ([5, 1 << 40], "must fit in 32 bits, got 5 to 1099511627776"),
        ([1.5], "must be integers, got float64"),
        (7, "must have one dimension"),
        (None, "must have one dimension"),
    ):
        with pytest.raises(RequestError, match=f"^token_ids: must be integers from 0 to 2147483647.*{said}"):
            ask(service, prompt)
    for name, target_s in (("slo_ttft_s", float("nan")), ("slo_itl_s", float("inf")), ("slo_itl_s", 0.0)):
        with pytest.raises(RequestError, match=f"{name}: must be seconds > 0, got {target_s:g}"):
            ask(service, **{name: target_s})
    with pytest.raises(Unavailable, match="draining, removed or excluded"):
        ask(service, exclude=("a", "b", "unknown"))
    with pytest.raises(Overloaded, match="2 workers are known"):
        await service.put("c", GatewayServer(url="http://c", model="m"))
    for _ in range(3):
        ask(service, "short")
    with pytest.raises(Overloaded, match="3 requests are open"):
        ask(service)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"total_blocks": 1 << 64}, "total_blocks: must be >= 0 and <= 2147483647, got 18446744073709551616"),
        ({"url": "http://c:99999"}, "url: must be http://HOST"),
        ({"url": "http://" + "c" * 2042}, "url: must have at most 2048 characters, got 2049"),
        ({"region": "r" * 257}, "region: must have at most 256 characters, got 257"),
        ({"adapters": ("a", "")}, "adapters: must have names"),
        ({"adapters": ("a", "a")}, "each its own"),
        ({"adapters": ("m",)}, "none the model's"),
        ({"prices": msgspec.structs.replace(UNKNOWN, prefill_token_s=-1.0)}, r"prefill_token_s: .*got -1"),
        ({"prices": msgspec.structs.replace(UNKNOWN, decode_step_s=1e300)}, ">= 0 and <= 3600, got 1e"),
        (
            {"prices": msgspec.structs.replace(UNKNOWN, decode_step_s=float("nan"))},
            "decode_step_s: .*got nan",
        ),
    ],
)
@scenario()
async def test_a_server_that_cannot_be_is_refused_and_the_others_go_on(service, fields, said):
    with pytest.raises(RequestError, match=said):
        await service.put("c", GatewayServer(**{"url": "http://c", "model": "m"} | fields))
    assert [view.name for view in service.workers()] == ["a", "b"]
    assert ask(service)[0] in {"a", "b"}


@scenario()
async def test_requests_are_routed_while_a_prefill_server_is_being_removed(service):
    transfer = ServerKvTransfer(prefill={"room": 1}, decode={"room": 1})

    def watched(role: Role) -> Watched:
        return Watched(
            role=role, kv_transfer_kind="x", make_transfer=lambda: transfer, transferred_prompts_only=True
        )

    for name in ("a", "b"):
        await service.remove(name)
    await service.put("d", GatewayServer(url="http://d", model="m"), watched(Role.DECODE))
    await service.put("p", GatewayServer(url="http://p", model="m"), watched(Role.PREFILL))
    removal = asyncio.create_task(service.servers.remove("p"))
    routed = 0
    while not removal.done():
        with suppress(Unavailable):
            choice = service.route(Query(model="m", prompt=TOKENS))
            assert choice.prefill is not None
            service.feedback(choice.id, RequestStage.FINISHED)
            routed += 1
        await asyncio.sleep(0)
    await removal
    assert routed > 1, "also while it was being removed"
    assert service.servers.worker_id("p") is None
