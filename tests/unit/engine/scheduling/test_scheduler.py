import numpy as np
import pytest

from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason, SamplingParams
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequences import Sampled, SequenceLimits
from penstock.kv.pool import BlockPool
from penstock.testing.engines.probe import make_request

SIZE = 4
EOS = 99


def make_scheduler(num_blocks=64, context_length=128, **config):
    limits = SequenceLimits(
        block_size=SIZE,
        model_context_length=context_length,
        kv_tokens=num_blocks * SIZE,
        vocab_size=100,
        hash_key=bytes(16),
    )
    settings = SchedulerConfig(**{"max_batch_tokens": 16, "max_running_requests": 4, **config})
    return Scheduler(BlockPool(num_blocks, SIZE), limits, settings, eos_token_ids=[EOS])


def prompt(length, first=0):
    return [(first + index) % 90 for index in range(length)]


def step(scheduler, token=1):
    plan = scheduler.plan()
    done = scheduler.commit(plan, Sampled(np.where(plan.samples, token, -1).astype(np.int32)))
    scheduler.check()
    return plan, done


def rows(scheduler, plan):
    ids = [scheduler.table.requests[slot].request_id for slot in plan.slots.tolist()]
    return list(zip(ids, plan.num_new.tolist(), plan.samples.tolist(), strict=True))


def test_decode_rows_come_first_and_prefill_shares_what_is_left():
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", prompt(5)))
    step(scheduler)
    scheduler.submit(make_request("b", prompt(40, 30)))
    scheduler.submit(make_request("c", prompt(9, 60)))
    plan = scheduler.plan()
    assert (rows(scheduler, plan), plan.num_decode) == ([("a", 1, True), ("b", 15, False)], 1)
    scheduler.commit(plan, Sampled(np.array([1, -1], dtype=np.int32)))
    step(scheduler)
    plan = scheduler.plan()
    assert rows(scheduler, plan) == [("a", 1, True), ("b", 10, True), ("c", 5, False)]


def test_a_step_takes_no_more_of_one_prompt_than_it_may_and_goes_on_with_the_next():
    scheduler = make_scheduler(max_prompt_tokens=6)
    for first, name in enumerate("abc"):
        scheduler.submit(make_request(name, prompt(9, 30 * first)))
    plans = []
    for _ in range(2):
        plan, _ = step(scheduler)
        plans.append(rows(scheduler, plan))
    assert plans[0] == [("a", 6, False), ("b", 6, False), ("c", 4, False)]
    assert plans[1] == [("a", 3, True), ("b", 3, True), ("c", 5, True)]


def test_ranks_add_up_and_a_prompt_has_one_of_them():
    config = SchedulerConfig.of_ranks(8, max_batch_tokens=2048, max_running_requests=32, failed_steps_max=5)
    assert (config.max_batch_tokens, config.prompt_budget, config.max_running_requests) == (16384, 2048, 256)
    assert config.failed_steps_max == 5
    assert (config.prompts_at_once, SchedulerConfig().prompts_at_once) == (8, 1)
    default = SchedulerConfig.of_ranks(2, max_batch_tokens=None, max_running_requests=None)
    assert (default.max_batch_tokens, default.prompt_budget, default.max_running_requests) == (1024, 512, 128)


@pytest.mark.parametrize(
    ("sampling", "token", "expected"),
    [
        (SamplingParams(max_tokens=5), EOS, (1, FinishReason.STOP)),
        (SamplingParams(max_tokens=5, ignore_eos=True), EOS, (5, FinishReason.LENGTH)),
        (SamplingParams(max_tokens=5, min_tokens=2), EOS, (3, FinishReason.STOP)),
        (SamplingParams(max_tokens=5, stop_token_ids=(7,)), 7, (1, FinishReason.STOP)),
        (SamplingParams(max_tokens=5, stop_token_ids=(7,)), 8, (5, FinishReason.LENGTH)),
        (SamplingParams(max_tokens=1, stop_token_ids=(7,)), 7, (1, FinishReason.STOP)),
        (SamplingParams(max_tokens=5, min_tokens=5), EOS, (5, FinishReason.LENGTH)),
    ],
)
def test_ends(sampling, token, expected):
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", prompt(6), sampling=sampling))
    reasons = [None]
    while reasons[-1] is None:
        reasons.append(step(scheduler, token)[1].deltas[0].finish_reason)
    assert (len(reasons) - 1, reasons[-1]) == expected
    assert scheduler.plan() is None


def computed_by_step(scheduler, steps):
    """Take steps, and give the prompt tokens that each request computes in them."""
    computed = []
    for _ in range(steps):
        plan = scheduler.plan()
        computed.append({name: tokens for name, tokens, _ in rows(scheduler, plan)})
        scheduler.commit(plan, Sampled(np.where(plan.samples, 1, -1).astype(np.int32)))
    return computed


def test_a_prompt_of_a_tenant_that_was_served_less_overtakes_one_that_is_under_way():
    scheduler = make_scheduler(num_blocks=200, context_length=400)
    scheduler.submit(make_request("long", prompt(100), max_tokens=1, tenant="flood"))
    scheduler.submit(make_request("next", prompt(40, 200), max_tokens=1, tenant="flood"))
    assert computed_by_step(scheduler, 2) == [{"long": 16}, {"long": 16}]
    scheduler.submit(make_request("quiet", prompt(24, 300), max_tokens=1, tenant="quiet"))
    assert computed_by_step(scheduler, 6) == [
        {"long": 16}, {"quiet": 16}, {"long": 16}, {"quiet": 8, "long": 8}, {"long": 16}, {"long": 12, "next": 4},
    ]  # fmt: skip
    scheduler.check()


def test_step_limits_keep_prompts_in_parallel():
    ranks = SchedulerConfig.of_ranks(4, max_batch_tokens=8192, max_running_requests=256)
    assert ranks.step_limits(None) == (32768, 8192)
    assert ranks.step_limits(2048) == (8192, 2048)
    assert ranks.step_limits(100) == (2048, 512), "a token for each that runs, and as many for prompts"
    assert SchedulerConfig(max_batch_tokens=512).step_limits(2048) == (512, 512)


def test_a_worker_takes_the_shortest_first_as_long_as_it_is_not_aggregated_and_as_many_tokens_as_these():
    scheduler = make_scheduler()
    for role, first, tokens in (
        (Role.PREFILL, "short", 17),
        (Role.AGGREGATED, "long", 9),
    ):  # then, some are cached
        scheduler.submit(make_request("long", prompt(20), max_tokens=1))
        scheduler.submit(make_request("short", prompt(5, 50), max_tokens=1))
        scheduler.assume(role, SchedulerConfig(max_batch_tokens=17))
        plan = scheduler.plan()
        assert rows(scheduler, plan)[0][0] == first
        assert plan.num_new.sum() == tokens
        for name in ("long", "short"):
            scheduler.abort(name)
        scheduler.commit(plan, Sampled(np.where(plan.samples, 1, -1).astype(np.int32)))
        scheduler.check()


@pytest.mark.parametrize(("role", "goes_first"), [(Role.DECODE, True), (Role.AGGREGATED, False)])
def test_what_was_transferred_goes_before_prompts_that_a_decode_worker_computes_itself(role, goes_first):
    scheduler = make_scheduler(num_blocks=200, context_length=400)
    scheduler.submit(make_request("first", prompt(81), max_tokens=1))
    while scheduler.load().running_requests or scheduler.load().waiting_requests:
        step(scheduler)
    scheduler.assume(role, SchedulerConfig(max_batch_tokens=16))
    scheduler.submit(make_request("own", prompt(300, 100)))
    step(scheduler)
    scheduler.submit(make_request("transferred", prompt(81)))  # all but its last token is here
    plan, _ = step(scheduler)
    expected = [("own", 15, False), ("transferred", 1, True)] if goes_first else [("own", 16, False)]
    assert rows(scheduler, plan) == expected
