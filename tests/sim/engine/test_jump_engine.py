"""The engine that jumps against the one that takes every step: the same requests, the same moments."""

import asyncio
import random

import numpy as np
import pytest

from penstock.core.ids import RequestId
from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.core.types.requests import KvRetention, Request, SamplingParams
from penstock.core.wire import PackedTokens, num_tokens, pack_hashes
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.groups.windows import ONE_TABLE, Windows
from penstock.kv.shared_loads import SharedLoads
from penstock.perf.model.hardware import find_hardware
from penstock.perf.model.model_config import shape_of
from penstock.perf.model.parallel import Parallel
from penstock.perf.profile.profile import DecodePoint, PrefillPoint, Profile, ProfiledModel
from penstock.perf.roofline.factors import Factors
from penstock.perf.roofline.roofline import Roofline
from penstock.perf.roofline.speculation import price_per_token
from penstock.sim.engine.engine import JumpEngine
from penstock.sim.engine.exact import ExactEngine
from penstock.sim.engine.prices import DecodePrices
from penstock.sim.engine.timed_tier import LowerTier
from penstock.sim.engine.timing import Pace
from penstock.sim.loop.loop import run_virtual
from penstock.sim.workload.workload import WorkloadConfig, make_sessions

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
    latency, *, num_blocks=512, block_size=16, scheduler=None, count=150, seed=1, abort_every=0,
    disturb=lambda _: (), lower_tiers=(), retains=False, tenants=1, windows=ONE_TABLE, crowd_s=0.0, **fields,
):  # fmt: skip
    info = RunnerInfo(
        num_blocks=num_blocks, block_size=block_size, context_length=8192, vocab_size=1 << 16, windows=windows,
    )  # fmt: skip
    scheduler = scheduler or SchedulerConfig(max_batch_tokens=512, max_running_requests=64)
    work = list(requests(seed, count, **fields))
    if crowd_s:
        work = [(at_s // crowd_s * crowd_s, *rest) for at_s, *rest in work]
    streams = {f"r{number}": item[3] for number, item in enumerate(work)}

    async def exact():
        pace = Pace()
        engine = ExactEngine(latency, info, scheduler, pace, lower_tiers=lower_tiers)
        return await drive(
            engine,
            work,
            block_size,
            abort_every=abort_every,
            disturb=disturb(pace),
            retains=retains,
            tenants=tenants,
        )

    async def jump():
        pace = Pace()
        engine = JumpEngine(
            latency, info, scheduler, lambda request: streams[request.request_id], pace=pace,
            lower_tiers=lower_tiers,
        )  # fmt: skip
        return await drive(
            engine,
            work,
            block_size,
            abort_every=abort_every,
            disturb=disturb(pace),
            retains=retains,
            tenants=tenants,
        )

    return run_virtual(exact()), run_virtual(jump())


def assert_equal(exact, jump):
    (times, load), (jumped, jumped_load) = exact, jump
    assert times.keys() == jumped.keys()
    for name, expected in times.items():
        assert jumped[name] == pytest.approx(expected, rel=1e-3), name
    for column in (
        "preemptions", "prefix_hit_tokens", "active_blocks", "cached_blocks", "onboarded_tokens", "steps",
    ):  # fmt: skip
        assert getattr(jumped_load, column) == getattr(load, column), column


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "latency",
    [H100, WINDOWED, PROFILED, SPECULATIVE],
    ids=["roofline", "windowed", "profiled", "speculative"],
)
def test_first_and_last_tokens_come_at_the_same_moments(latency, seed):
    exact, jump = both(
        latency, seed=seed, input_tokens=400, output_tokens=100, shared_prefix_tokens=256, prefix_groups=3
    )
    assert_equal(exact, jump)
    assert exact[1].prefix_hit_tokens > 1000


def test_they_agree_on_what_retention_keeps():
    fields = {
        "input_tokens": 300, "output_tokens": 60, "shared_prefix_tokens": 1024, "prefix_groups": 20,
        "num_blocks": 1024, "rate_per_s": 12.0, "scheduler": SchedulerConfig(tenant_share=0.4),
    }  # fmt: skip
    without = both(H100, **fields)
    exact, jump = both(H100, retains=True, tenants=3, **fields)
    assert_equal(exact, jump)
    assert exact[1].prefix_hit_tokens != without[0][1].prefix_hit_tokens


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_they_agree_when_blocks_run_out(block_size):
    exact, jump = both(
        H100,
        num_blocks=4096 // block_size,
        block_size=block_size,
        input_tokens=100,
        output_tokens=300,
        count=120,
    )
    assert_equal(exact, jump)
    assert exact[1].preemptions > 3


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("windows", "fields"),
    [
        (Windows(((128, 18),), 18), {"num_blocks": 300, "output_tokens": 300}),
        (Windows(((256, 52),), 10), {"num_blocks": 600, "output_tokens": 200, "abort_every": 7}),
        (
            Windows(((64, 3), (200, 2)), 4),
            {"num_blocks": 400, "output_tokens": 200, "scheduler": SchedulerConfig(
                max_batch_tokens=256, max_running_requests=24, order="shortest", ageing=0.5)},
        ),
        (
            Windows(((128, 5),), 1),
            {"num_blocks": 500, "output_tokens": 300, "lower_tiers": (LowerTier(Tier.HOST, 2048),),
             "shared_prefix_tokens": 1024, "prefix_groups": 20, "input_tokens": 200, "rate_per_s": 20.0},
        ),
    ],
    ids=["one to one", "five to one", "two sizes", "tiers"],
)  # fmt: skip
def test_they_agree_on_models_with_sliding_windows(windows, fields, seed):
    fields = {"input_tokens": 300, "count": 80} | fields
    exact, jump = both(H100, windows=windows, seed=seed, **fields)
    if "abort_every" not in fields:
        assert_equal(exact, jump)
    for name, times in exact[0].items():
        if times != ("aborted",):
            assert jump[0][name] == pytest.approx(times, rel=1e-3), name
    without, _ = both(H100, seed=seed, **fields)
    assert exact[0] != without[0], "windows take blocks"
    assert exact[1].active_blocks == jump[1].active_blocks == 0, "they give them back"


def test_they_agree_when_requests_are_aborted():
    exact, jump = both(H100, abort_every=3, input_tokens=600, output_tokens=200, num_blocks=400)
    for name, times in exact[0].items():
        if times != ("aborted",):
            assert jump[0][name] == pytest.approx(times, rel=1e-3), name


def test_they_agree_when_the_batch_is_full():
    scheduler = SchedulerConfig(max_batch_tokens=128, max_running_requests=8)
    assert_equal(*both(H100, scheduler=scheduler, input_tokens=300, output_tokens=40))


def test_they_agree_where_a_prompt_runs_on_one_of_several_ranks():
    scheduler = SchedulerConfig.of_ranks(8, max_batch_tokens=128, max_running_requests=6)
    exact, jump = both(WIDE, scheduler=scheduler, input_tokens=900, output_tokens=60, num_blocks=4096)
    assert_equal(exact, jump)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "fields",
    [
        {"input_tokens": 800, "output_tokens": 1, "num_blocks": 2048, "rate_per_s": 60.0},
        {"input_tokens": 300, "output_tokens": 200, "num_blocks": 300},
        {
            "input_tokens": 300, "output_tokens": 60, "shared_prefix_tokens": 1024, "prefix_groups": 20,
            "lower_tiers": (LowerTier(Tier.HOST, 2048),), "rate_per_s": 12.0,
        },
    ],
    ids=["prompts alone", "out of blocks", "tiers"],
)  # fmt: skip
def test_they_agree_where_tenants_take_turns(fields, seed):
    scheduler = SchedulerConfig(max_batch_tokens=256, max_running_requests=24)
    exact, jump = both(H100, scheduler=scheduler, seed=seed, count=80, tenants=3, **fields)
    assert_equal(exact, jump)
    as_they_came, _ = both(H100, scheduler=scheduler, seed=seed, count=80, **fields)
    assert exact[0] != as_they_came[0]


@pytest.mark.parametrize(("seed", "ageing"), [(0, 0.02), (1, 0.5)])
@pytest.mark.parametrize(
    "fields",
    [
        {"input_tokens": 800, "output_tokens": 1, "num_blocks": 2048, "rate_per_s": 60.0},
        {"input_tokens": 300, "output_tokens": 200, "num_blocks": 300, "abort_every": 5},
        {
            "input_tokens": 300, "output_tokens": 60, "shared_prefix_tokens": 1024, "prefix_groups": 20,
            "lower_tiers": (LowerTier(Tier.HOST, 2048),), "rate_per_s": 12.0,
        },
    ],
    ids=["prompts alone", "out of blocks", "tiers"],
)  # fmt: skip
def test_they_agree_where_the_shortest_prompt_is_first(fields, seed, ageing):
    scheduler = SchedulerConfig(
        max_batch_tokens=256, max_running_requests=24, order="shortest", ageing=ageing
    )
    exact, jump = both(H100, scheduler=scheduler, seed=seed, count=80, **fields)
    if "abort_every" not in fields:
        assert_equal(exact, jump)
    for name, times in exact[0].items():
        if times != ("aborted",):
            assert jump[0][name] == pytest.approx(times, rel=1e-3), name
    usual = SchedulerConfig(max_batch_tokens=256, max_running_requests=24)
    as_they_came, _ = both(H100, scheduler=usual, seed=seed, count=80, **fields)
    assert exact[0] != as_they_came[0]


HOST = (LowerTier(Tier.HOST, 2048),)
SHARED = {
    "input_tokens": 200, "output_tokens": 60, "shared_prefix_tokens": 1024, "prefix_groups": 20, "rate_per_s": 12.0,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_they_agree_where_the_host_holds_what_the_device_gave_up(seed):
    exact, jump = both(H100, seed=seed, lower_tiers=HOST, **SHARED)
    assert_equal(exact, jump)
    (without, _) = both(H100, seed=seed, **SHARED)
    assert exact[1].onboarded_tokens[0] > 20_000
    assert exact[1].prefix_hit_tokens > without[1].prefix_hit_tokens + 20_000
    assert exact[1].prefilled_tokens < without[1].prefilled_tokens - 20_000
    first_s, cached = (
        [np.mean([times[column] for times in engine[0].values()]) for engine in (exact, without)]
        for column in (0, 3)
    )
    assert first_s[0] < first_s[1]
    assert cached[0] > cached[1] + 100


@pytest.mark.parametrize("seed", range(3))
def test_they_agree_on_three_lower_tiers_that_all_run_full(seed):
    lower = (LowerTier(Tier.HOST, 300), LowerTier(Tier.DISK, 500), LowerTier(Tier.OBJECT, 600))
    exact, jump = both(QUICK_TIERS, seed=seed, lower_tiers=lower, num_blocks=300, **SHARED)
    assert_equal(exact, jump)
    assert all(tokens > 2000 for tokens in exact[1].onboarded_tokens)


@pytest.mark.parametrize("seed", range(3))
def test_they_agree_where_fetches_are_slow_and_blocks_run_out(seed):
    fields = SHARED | {"output_tokens": 300, "rate_per_s": 20.0}
    exact, jump = both(SLOW_HOST, seed=seed, lower_tiers=HOST, num_blocks=300, count=100, **fields)
    assert_equal(exact, jump)
    assert exact[1].onboarded_tokens[0] > 10_000
    assert exact[1].preemptions > 3


def test_they_agree_when_requests_are_aborted_while_their_prefix_comes():
    exact, jump = both(SLOW_HOST, abort_every=3, lower_tiers=HOST, **SHARED)
    for name, times in exact[0].items():
        if times != ("aborted",):
            assert jump[0][name] == pytest.approx(times, rel=1e-3), name
    assert exact[1].onboarded_tokens == jump[1].onboarded_tokens


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("abort_every", [0, 3])
def test_they_agree_where_crowds_wait_for_one_load(monkeypatch, seed, abort_every):
    joined = []
    join = SharedLoads.join
    monkeypatch.setattr(
        SharedLoads,
        "join",
        lambda loads, load, *waiter: (joined.append(len(load.waiters)), join(loads, load, *waiter)),
    )
    fields = SHARED | {"prefix_groups": 8}
    exact, jump = both(
        SLOW_HOST, seed=seed, abort_every=abort_every, lower_tiers=HOST, crowd_s=2.0, count=120, **fields
    )
    if abort_every:
        assert exact[1].onboarded_tokens == jump[1].onboarded_tokens
    else:
        assert_equal(exact, jump)
    assert sum(waiting > 0 for waiting in joined) > 1


def test_they_agree_on_a_host_that_stops_and_slows_down_while_prefixes_come():
    exact, jump = both(SLOW_HOST, disturb=disturbed, lower_tiers=HOST, **SHARED)
    assert_equal(exact, jump)
    assert exact[1].onboarded_tokens[0] > 10_000


def test_what_takes_longer_to_fetch_than_to_compute_is_computed():
    at_its_turn = SchedulerConfig(prefetched_requests=0)
    exact, jump = both(NO_USE, lower_tiers=HOST, scheduler=at_its_turn, **SHARED)
    assert_equal(exact, jump)
    assert exact[1].onboarded_tokens == (0, 0, 0)
    without, _ = both(NO_USE, **SHARED)
    assert exact[0] == without[0]


def test_it_is_fetched_while_its_request_waits_for_longer():
    exact, jump = both(NO_USE, lower_tiers=HOST, **SHARED)
    assert_equal(exact, jump)
    assert exact[1].onboarded_tokens[0] > 0


def test_they_agree_where_shorter_prompts_overtake_one_whose_prefix_comes():
    one_ahead = SchedulerConfig(
        max_batch_tokens=512, max_running_requests=4, prefetched_requests=1, order="shortest"
    )
    exact, jump = both(SLOW_HOST, lower_tiers=HOST, scheduler=one_ahead, **SHARED)
    assert_equal(exact, jump)
    assert exact[1].onboarded_tokens[0] > 0


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


def test_they_agree_on_a_host_that_stops_and_slows_down():
    fields = {"input_tokens": 400, "output_tokens": 200}
    exact, jump = both(H100, disturb=disturbed, **fields)
    assert_equal(exact, jump)
    undisturbed, _ = both(H100, **fields)
    assert exact[0]["r149"][1] > undisturbed[0]["r149"][1] + 0.5


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
    jump = run_virtual(
        told(lambda: JumpEngine(H100, info, scheduler, lambda r: work[int(r.request_id[1:])][3]))
    )
    assert jump == exact
    assert all(count > 0 for counts in exact[0] for count in counts.values())


@pytest.mark.parametrize("latency", [H100, WINDOWED, PROFILED], ids=["roofline", "windowed", "profiled"])
def test_sums_of_steps_are_exact(latency):
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
