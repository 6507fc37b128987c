import asyncio

import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError, EngineError
from penstock.core.types.requests import FinishReason, SamplingParams
from penstock.engine.mock import MockConfig, MockKv, StepTiming, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.sequences import SequenceTable, StepPlan
from penstock.testing.engines.probe import EngineProbe, make_request

SHAPE = RunnerInfo(num_blocks=256, block_size=4, context_length=512, vocab_size=1000, eos_token_ids=(2, 3))
TIMING = StepTiming(
    step_s=0.010,
    prefill_s_per_token=0.001,
    prefill_s_per_token2=0.0,
    decode_s_per_request=0.002,
    decode_s_per_context_token=0.0001,
)


async def answers(*requests, config=None):
    async with EngineProbe(mock_engine(SHAPE, config or MockConfig(speedup=1e6))) as probe:
        return await probe.run(*requests)


@pytest.mark.parametrize("speedup", [1.0, 4.0])
@pytest.mark.virtual
async def test_a_step_takes_what_the_formula_says(speedup):
    now_s = asyncio.get_running_loop().time
    engine = mock_engine(
        SHAPE, MockConfig(timing=TIMING, speedup=speedup), SchedulerConfig(max_batch_tokens=64)
    )
    async with EngineProbe(engine) as probe:
        probe.submit(make_request("a", range(40), max_tokens=5))
        times = []
        while probe.is_busy:
            start_s = now_s()
            await probe.step()
            times.append((now_s() - start_s) * speedup)
        assert times[0] == pytest.approx(0.010 + 40 * 0.001)
        assert times[1:] == pytest.approx([0.012 + 0.0001 * context for context in range(40, 44)])


async def test_an_answer_ends_by_itself_at_a_length_its_prompt_decides():
    sampling = SamplingParams(max_tokens=400, temperature=0.0)
    config = MockConfig(speedup=1e6, answer_tokens=20)
    requests = [make_request(f"r{i}", range(i, i + 8), sampling=sampling) for i in range(40)]
    heard = await answers(*requests, config=config)
    assert {answer.finish_reason for answer in heard} == {FinishReason.STOP}
    assert all(answer.token_ids[-1] == 2 and 11 <= len(answer.token_ids) <= 30 for answer in heard)
    assert len({len(answer.token_ids) for answer in heard}) > 5
    again = await answers(*reversed(requests), config=config)
    assert [answer.token_ids for answer in reversed(again)] == [answer.token_ids for answer in heard]
    longer = SamplingParams(max_tokens=400, temperature=0.0, min_tokens=100)
    (answer,) = await answers(make_request("a", range(8), sampling=longer), config=config)
    assert len(answer.token_ids) == 101


def test_kv_of_another_prefix_is_noticed():
    shape = RunnerInfo(num_blocks=4, block_size=4, context_length=16, vocab_size=50, kv_bytes_per_block=32)
    kv = MockKv(shape)
    table = SequenceTable.allocate(1, 16, 4)
    table.token_ids[0, :9] = range(9)
    table.block_tables[0, :3] = [2, 0, 1]
    table.num_tokens[0] = 6

    def plan(num_new, num_decode):
        return StepPlan(
            np.zeros(1, dtype=np.int32), np.array([num_new], dtype=np.int32), num_decode, np.array([True])
        )

    kv.compute(plan(6, 0), table)
    table.num_computed[0], table.num_tokens[0] = 6, 7
    kv.compute(plan(1, 1), table)
    table.num_computed[0], table.num_tokens[0] = 7, 9
    kv.compute(plan(2, 0), table)
    blocks = kv.memory[[2, 0]]
    kv.memory[[0, 2]] = blocks
    with pytest.raises(EngineError, match="7 tokens belongs to other prefixes"):
        kv.compute(plan(2, 0), table)
    kv.memory[[2, 0]] = blocks
    kv.compute(plan(2, 0), table)
    table.token_ids[0, 0] = 40
    with pytest.raises(EngineError, match="other prefixes"):
        kv.compute(plan(2, 0), table)


async def test_settings_that_cannot_work():
    for change, text in (
        ({"kv_bytes_per_block": 20}, "kv_bytes_per_block: must be 0 or >= 32"),
        ({"vocab_size": 4}, "vocab_size: must leave tokens"),
    ):
        values = {name: getattr(SHAPE, name) for name in RunnerInfo.__slots__} | change
        with pytest.raises(ConfigError, match=text):
            await mock_engine(RunnerInfo(**values)).start()


async def test_end_tokens_past_the_vocabulary_are_left_out_with_a_warning():
    shape = RunnerInfo(
        num_blocks=8, block_size=4, context_length=32, vocab_size=10, eos_token_ids=(10, -1, 6)
    )
    with capture_logs() as logs:
        async with EngineProbe(mock_engine(shape, MockConfig(speedup=1e6, answer_tokens=4))) as probe:
            (answer,) = await probe.run(
                make_request("a", [1], sampling=SamplingParams(max_tokens=30, temperature=0.0))
            )
    assert answer.token_ids[-1] == 6
    assert answer.finish_reason is FinishReason.STOP
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [(entry["left_out"], entry["vocab_size"]) for entry in warnings] == [([10, -1], 10)]
