"""The engine that jumps against the one that takes every step: the same requests, the same moments."""

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from penstock.core.ids import RequestId
from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import KvRetention, Request, SamplingParams
from penstock.core.wire import PackedTokens, num_tokens, pack_hashes
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.groups import ONE_TABLE, Windows
from penstock.perf.hardware import find_hardware
from penstock.perf.latency import LatencyModel
from penstock.perf.model_config import shape_of
from penstock.perf.model_shape import Parallel
from penstock.perf.profile import DecodePoint, PrefillPoint, Profile, ProfiledModel
from penstock.perf.roofline import Factors, Roofline, price_per_token
from penstock.sim.engine import ExactEngine, JumpEngine
from penstock.sim.engine_timing import DecodePrices, HostPace, LowerTier
from penstock.sim.loop import run_virtual
from penstock.sim.workload import WorkloadConfig, make_sessions

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")
SHAPE = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
H100 = Roofline(shape_of(SHAPE, name="8b"), find_hardware("h100"))
WINDOWED = Roofline(shape_of(SHAPE | {"sliding_window": 512}, name="8b-window"), find_hardware("h100"))
WIDE = Roofline(shape_of(SHAPE, name="8b-wide"), find_hardware("h100"), Parallel(dp=8))
SPECULATIVE = price_per_token(
    Roofline(shape_of(SHAPE, name="8b"), find_hardware("h100"), tokens_per_step=1.8)
)


def with_storage(host, disk=5e9, objects=1e9):
    rates = {Tier.HOST: host, Tier.DISK: disk, Tier.OBJECT: objects}
    return Roofline(
        shape_of(SHAPE, name="8b"), find_hardware("h100"), factors=Factors(storage_bytes_per_s=rates)
    )


SLOW_HOST = with_storage(10e9)  # computing takes hardly longer than fetching
QUICK_TIERS = with_storage(40e9, 30e9, 20e9)
NO_USE = with_storage(1e9)
PROFILED = ProfiledModel(
    Profile(
        engine="test",
        prefill=(PrefillPoint(new_tokens=64, seconds=0.01), PrefillPoint(new_tokens=1024, seconds=0.05)),
        decode=tuple(
            DecodePoint(
                batch, context, 0.005 + 1e-4 * batch + 3e-8 * batch * context + 1e-3 * (context > 100)
            )
            for batch in (1, 8, 32)
            for context in (16, 256, 4096)
        ),
    )
)


def requests(seed, count, **fields):
    """Give (at_s, request, stream) of a synthetic workload; some are aborted later."""
    rng = random.Random(seed)
    config = WorkloadConfig(**{"requests": count, "rate_per_s": 20.0, "length_sigma": 0.8} | fields)
    for number, session in enumerate(make_sessions(config, rng)):
        turn = session.turns[0]
        tokens = np.random.default_rng(number).integers(0, 60_000, min(turn.input_tokens, 3000), dtype="<i4")
        yield session.at_s, tokens, min(turn.output_tokens, 3000), session.prompt


def retention_of(number):
    """Of every third request; a few last so long that they end while others run."""
    return KvRetention(priority=number % 5 - 1, ttl_s=0.5 + number % 7) if number % 3 == 0 else None


async def drive(engine, work, block_size, *, abort_every=0, disturb=(), retains=False, tenants=1):
    """Give {request: (first token's moment, last's, tokens, cached ones)} and what the engine says at the end."""
    loop = asyncio.get_running_loop()
    await engine.start()
    seen = {}
    done = asyncio.Event()
    left = [len(work)]

    def ended():
        left[0] -= 1
        if not left[0]:
            done.set()

    def submit(number, tokens, output_tokens, prompt):
        request = Request(
            request_id=RequestId(f"r{number}"),
            model="m",
            token_ids=PackedTokens(tokens.tobytes()),
            sampling=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            block_hashes=pack_hashes(prompt.block_hashes(block_size, 0, len(tokens) // block_size)),
            retention=retention_of(number) if retains else None,
            follows_tool=retains and number % 4 == 1,
            tenant=f"t{min(number % 7, tenants - 1)}",
        )
        engine.submit(request)
        if abort_every and number % abort_every == 0:
            loop.call_later(0.05 * (number % 7), abort, request.request_id)

    def abort(request_id):
        if seen.get(request_id, (0, None, 0))[1] is None:
            seen[request_id] = ("aborted",)
            engine.abort(request_id)
            ended()

    async def read():
        async for step in engine.steps():
            for delta in step.deltas:
                first, last, count, cached = seen.get(
                    delta.request_id, (loop.time(), None, 0, delta.cached_tokens)
                )
                count += num_tokens(delta.token_ids)
                if delta.finish_reason is not None:
                    last = loop.time()
                seen[delta.request_id] = (first, last, count, cached)
                if last is not None:
                    ended()

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(read())
        for number, (at_s, *rest) in enumerate(work):
            loop.call_at(at_s, submit, number, *rest)
        for at_s, what, *args in disturb:
            loop.call_at(at_s, what, *args)
        await done.wait()
        await asyncio.sleep(1.0)
        engine.check()
        load = engine.load()
        reader.cancel()
    await engine.close()
    return seen, load


def both(
    latency, *, num_blocks=512, block_size=16, scheduler=None, count=150, seed=1, disturb=lambda _: (),
    lower_tiers=(), windows=ONE_TABLE, crowd_s=0.0, abort_every=0, retains=False, tenants=1, **fields,
):  # fmt: skip
    """Run the same work on both engines; `fields` are of the workload."""
    info = RunnerInfo(
        num_blocks=num_blocks, block_size=block_size, context_length=8192, vocab_size=1 << 16, windows=windows,
    )  # fmt: skip
    scheduler = scheduler or SchedulerConfig(max_batch_tokens=512, max_running_requests=64)
    work = list(requests(seed, count, **fields))
    if crowd_s:
        work = [(at_s // crowd_s * crowd_s, *rest) for at_s, *rest in work]

    def exact(pace):
        return ExactEngine(latency, info, scheduler, pace, lower_tiers=lower_tiers)

    def jump(pace):
        return JumpEngine(latency, info, scheduler, stream_of(work), pace=pace, lower_tiers=lower_tiers)

    async def run(make):
        pace = HostPace()
        told = {"abort_every": abort_every, "retains": retains, "tenants": tenants}
        return await drive(make(pace), work, block_size, disturb=disturb(pace), **told)

    return run_virtual(run(exact)), run_virtual(run(jump))


def stream_of(work):
    return lambda request: work[int(request.request_id[1:])][3]


def assert_equal(exact, jump):
    """Compare all, or where requests were aborted those that were not: the others had got as far as they had."""
    (times, load), (jumped, jumped_load) = exact, jump
    assert times.keys() == jumped.keys()
    is_whole = ("aborted",) not in times.values()
    for name, expected in times.items():
        if expected != ("aborted",):
            assert jumped[name] == pytest.approx(expected, rel=1e-3), name
    columns = (
        "preemptions",
        "prefix_hit_tokens",
        "active_blocks",
        "cached_blocks",
        "onboarded_tokens",
        "steps",
    )
    for column in columns if is_whole else ():
        assert getattr(jumped_load, column) == getattr(load, column), column


class Case(NamedTuple):
    """Work on which both engines agree, and what it is about."""

    fields: dict
    shows: Callable[[WorkerLoad], bool] = lambda _load: True
    """What the engine says at the end, or the case is not what it is named after."""
    unlike: dict | None = None
    """Fields of a run in which the moments are others."""
    latency: LatencyModel = H100


def set_factor(pace, factor):
    pace.factor = factor


def disturbed(pace):
    """Stop and slow a host again and again, for less than a step and for much longer."""
    rng = random.Random(5)
    at_s = 0.5
    for number in range(12):
        lasts_s = rng.choice([0.001, 0.004, 0.05, 0.7])
        if number % 2:
            yield at_s, pace.stop
            yield at_s + lasts_s, pace.go_on
        else:
            yield at_s, set_factor, pace, rng.choice([0.5, 3.0])
            yield at_s + lasts_s, set_factor, pace, 1.0
        at_s += lasts_s + rng.uniform(0.1, 0.6)


def scheduled(tokens=256, requests=24, **settings):
    return SchedulerConfig(max_batch_tokens=tokens, max_running_requests=requests, **settings)


HOST = (LowerTier(Tier.HOST, 2048),)
SHARED = {
    "input_tokens": 200, "output_tokens": 60, "shared_prefix_tokens": 1024, "prefix_groups": 20, "rate_per_s": 12.0,
}  # fmt: skip
FEW = {"input_tokens": 400, "output_tokens": 100, "shared_prefix_tokens": 256, "prefix_groups": 3}
LATENCIES = {"roofline": H100, "windowed": WINDOWED, "profiled": PROFILED, "speculative": SPECULATIVE}
WINDOWS = {
    "one to one": {"windows": Windows(((128, 18),), 18), "num_blocks": 300, "output_tokens": 300},
    "five to one": {
        "windows": Windows(((256, 52),), 10), "num_blocks": 600, "output_tokens": 200, "abort_every": 7,
    },
    "two sizes": {
        "windows": Windows(((64, 3), (200, 2)), 4), "num_blocks": 400, "output_tokens": 200,
        "scheduler": scheduled(order="shortest", ageing=0.5),
    },
    "tiers": SHARED | {
        "windows": Windows(((128, 5),), 1), "num_blocks": 500, "output_tokens": 300, "lower_tiers": HOST,
        "rate_per_s": 20.0,
    },
}  # fmt: skip
ORDERED = {
    "prompts alone": {"input_tokens": 800, "output_tokens": 1, "num_blocks": 2048, "rate_per_s": 60.0},
    "out of blocks": {"input_tokens": 300, "output_tokens": 200, "num_blocks": 300},
    "tiers": SHARED | {"input_tokens": 300, "lower_tiers": HOST},
}
THREE = (LowerTier(Tier.HOST, 300), LowerTier(Tier.DISK, 500), LowerTier(Tier.OBJECT, 600))
ONE_AHEAD = scheduled(512, 4, prefetched_requests=1, order="shortest")
RANKS = SchedulerConfig.of_ranks(8, max_batch_tokens=128, max_running_requests=6)
CASES = {
    **{
        name: Case(FEW, lambda load: load.prefix_hit_tokens > 1000, latency=latency)
        for name, latency in LATENCIES.items()
    },
    **{
        f"blocks of {size} run out": Case(
            {
                "num_blocks": 4096 // size, "block_size": size, "input_tokens": 100, "output_tokens": 300,
                "count": 120,
            },
            lambda load: load.preemptions > 3,
        )
        for size in (1, 16, 64)
    },
    **{
        f"windows, {name}": Case(
            {"input_tokens": 300, "count": 80} | fields,
            lambda load: load.active_blocks == 0,
            unlike={"windows": ONE_TABLE},
        )
        for name, fields in WINDOWS.items()
    },
    **{
        f"tenants take turns, {name}": Case(
            {"tenants": 3, "count": 80, "scheduler": scheduled()} | fields, unlike={"tenants": 1}
        )
        for name, fields in ORDERED.items()
    },
    **{
        f"the shortest first, {name}": Case(
            {"count": 80, "scheduler": scheduled(order="shortest", ageing=ageing), "abort_every": aborts} | fields,
            unlike={"scheduler": scheduled()},
        )
        for (name, fields), ageing, aborts in zip(ORDERED.items(), (0.02, 0.5, 0.5), (0, 5, 0), strict=True)
    },
    "retention": Case(
        SHARED | {
            "input_tokens": 300, "num_blocks": 1024, "scheduler": SchedulerConfig(tenant_share=0.4),
            "retains": True, "tenants": 3,
        },
        unlike={"retains": False, "tenants": 1},
    ),
    "aborted": Case({"abort_every": 3, "input_tokens": 600, "output_tokens": 200, "num_blocks": 400}),
    "a full batch": Case({"scheduler": scheduled(128, 8), "input_tokens": 300, "output_tokens": 40}),
    "ranks": Case(
        {"scheduler": RANKS, "input_tokens": 900, "output_tokens": 60, "num_blocks": 4096}, latency=WIDE
    ),
    "a host that stops": Case(
        {"disturb": disturbed, "input_tokens": 400, "output_tokens": 200}, unlike={"disturb": lambda _: ()}
    ),
    "a host holds what the device gave up": Case(
        SHARED | {"lower_tiers": HOST}, lambda load: load.onboarded_tokens[0] > 20_000, unlike={"lower_tiers": ()}
    ),
    "three lower tiers run full": Case(
        SHARED | {"lower_tiers": THREE, "num_blocks": 300},
        lambda load: min(load.onboarded_tokens) > 2000,
        latency=QUICK_TIERS,
    ),
    "slow fetches, blocks run out": Case(
        SHARED
        | {"output_tokens": 300, "rate_per_s": 20.0, "lower_tiers": HOST, "num_blocks": 300, "count": 100},
        lambda load: load.onboarded_tokens[0] > 10_000 and load.preemptions > 3,
        latency=SLOW_HOST,
    ),
    "aborted while a prefix comes": Case(
        SHARED | {"abort_every": 3, "lower_tiers": HOST},
        lambda load: load.onboarded_tokens[0] > 0,
        latency=SLOW_HOST,
    ),
    "crowds wait for one load": Case(
        SHARED | {"prefix_groups": 8, "lower_tiers": HOST, "crowd_s": 2.0, "count": 120},
        lambda load: load.onboarded_tokens[0] > 0,
        latency=SLOW_HOST,
    ),
    "a host that stops while prefixes come": Case(
        SHARED | {"disturb": disturbed, "lower_tiers": HOST},
        lambda load: load.onboarded_tokens[0] > 10_000,
        latency=SLOW_HOST,
    ),
    "fetched while its request waits for longer": Case(
        SHARED | {"lower_tiers": HOST}, lambda load: load.onboarded_tokens[0] > 0, latency=NO_USE
    ),
    "shorter prompts overtake one whose prefix comes": Case(
        SHARED | {"lower_tiers": HOST, "scheduler": ONE_AHEAD},
        lambda load: load.onboarded_tokens[0] > 0,
        latency=SLOW_HOST,
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_other_work_differs_by_a_few_evictions_at_most(name, seed):
    """Which of two blocks that are worth about the same is evicted may depend on rounding: what follows differs a little."""
    case = CASES[name]
    (times, _), (jumped, _) = both(case.latency, seed=seed, **case.fields)
    whole = [each for each in times if times[each] != ("aborted",)]
    others = [each for each in whole if jumped[each] != pytest.approx(times[each], rel=1e-3)]
    assert len(others) <= 0.1 * len(whole), others
    first_s, cached = (
        [(sum(run[each][column] for each in whole)) for run in (times, jumped)] for column in (0, 3)
    )
    assert first_s[1] == pytest.approx(first_s[0], rel=1e-3)
    assert cached[1] == pytest.approx(cached[0], rel=0.02)


@pytest.mark.parametrize("name", CASES)
def test_they_agree(name):
    case, seed = CASES[name], 1
    exact, jump = both(case.latency, seed=seed, **case.fields)
    assert_equal(exact, jump)
    assert case.shows(exact[1])
    if case.unlike is not None:
        without, _ = both(case.latency, seed=seed, **case.fields | case.unlike)
        assert exact[0] != without[0]


def test_a_host_tier_saves_prompt_tokens_and_time():
    (exact, load), _ = both(H100, lower_tiers=HOST, **SHARED)
    (without, bare), _ = both(H100, **SHARED)
    assert load.prefix_hit_tokens > bare.prefix_hit_tokens + 20_000
    assert load.prefilled_tokens < bare.prefilled_tokens - 20_000
    first_s, cached = (
        [np.mean([times[column] for times in seen.values()]) for seen in (exact, without)]
        for column in (0, 3)
    )
    assert first_s[0] < first_s[1]
    assert cached[0] > cached[1] + 100


def test_what_takes_longer_to_fetch_than_to_compute_is_computed():
    at_its_turn = SchedulerConfig(prefetched_requests=0)
    exact, jump = both(NO_USE, lower_tiers=HOST, scheduler=at_its_turn, **SHARED)
    assert_equal(exact, jump)
    assert exact[1].onboarded_tokens == (0, 0, 0)
    without, _ = both(NO_USE, **SHARED)
    assert exact[0] == without[0]


def test_a_fault_finds_the_same_deltas_sent_as_by_the_exact_engine():
    work = list(requests(2, 20, input_tokens=300, output_tokens=400))
    info = RunnerInfo(num_blocks=2048, block_size=16, context_length=8192, vocab_size=1 << 16)
    scheduler = SchedulerConfig(max_batch_tokens=512, max_running_requests=64)

    async def told(make):
        engine = make()
        await engine.start()
        counts = {}

        def count(step):
            for delta in step.deltas:
                counts[delta.request_id] = counts.get(delta.request_id, 0) + num_tokens(delta.token_ids)

        async def read():
            async for step in engine.steps():
                count(step)

        async with asyncio.TaskGroup() as group:
            reader = group.create_task(read())
            for number, (_, tokens, output_tokens, prompt) in enumerate(work):
                hashes = pack_hashes(prompt.block_hashes(16, 0, len(tokens) // 16))
                engine.submit(
                    Request(
                        request_id=RequestId(f"r{number}"), model="m", token_ids=PackedTokens(tokens.tobytes()),
                        sampling=SamplingParams(max_tokens=output_tokens, ignore_eos=True), block_hashes=hashes,
                    )
                )  # fmt: skip
            at = []
            for _ in range(6):
                await asyncio.sleep(0.377)
                step = engine.so_far()
                if step is not None:
                    count(step)
                engine.check()
                at.append(dict(counts))
            reader.cancel()
        load = engine.load()
        return at, load.active_blocks, load.generated_tokens

    exact = run_virtual(told(lambda: ExactEngine(H100, info, scheduler)))
    jump = run_virtual(told(lambda: JumpEngine(H100, info, scheduler, stream_of(work))))
    assert jump == exact
    assert all(count > 0 for counts in exact[0] for count in counts.values())


@pytest.mark.parametrize("name", ["roofline", "windowed", "profiled"])
def test_sums_of_steps_are_exact(name):
    latency = LATENCIES[name]
    prices = DecodePrices(latency, 8192)
    rng = random.Random(0)
    for _ in range(30):
        batch = rng.randrange(1, 40)
        context = rng.randrange(batch, batch * 4000)
        steps = rng.randrange(1, 2000)
        total = sum(latency.decode_step_s(batch, context + batch * step) for step in range(steps))
        assert prices.total_s(batch, context, steps) == pytest.approx(total, rel=1e-5)
        some = prices.steps_until(batch, context, total / 2, steps)
        assert prices.total_s(batch, context, some) >= total / 2
        assert some == 1 or prices.total_s(batch, context, some - 1) < total / 2
