"""`penstock profile` without a clock to wait for: planning, a sweep of the mock engine on virtual time, the verdict."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, EngineError
from penstock.engine.mock import MockConfig, MockEngine, MockRunner, StepTiming
from penstock.engine.runner import RunnerInfo
from penstock.perf.profile import Latency, LinearPrior, Profile, ProfiledModel
from penstock.profiling.engine_target import EngineTarget
from penstock.profiling.profiler import sweep
from penstock.profiling.report import make_page
from penstock.profiling.sweep import QUICK, SweepConfig, measure, plan_sweep
from penstock.profiling.target import Description, Limits, PrefillCell
from penstock.sim.loop import run_virtual

SHAPE = RunnerInfo(num_blocks=4096, block_size=16, context_length=4096, vocab_size=2000)
TIMING = MockConfig(
    timing=StepTiming(
        step_s=0.02, prefill_s_per_token=1e-4, prefill_s_per_token2=2e-8, decode_s_per_request=3e-4,
        decode_s_per_context_token=1e-7,
    )
)  # fmt: skip
SAID = Description(engine="mock", model="m", engine_version="v", hardware="cpu", machine="here")
SMALL = SweepConfig(
    prompt_tokens=(16, 64, 256), contexts=(64, 512, 1024), batches=(1, 4, 16), repeats=2, held_out=6
)


class Runner(MockRunner):
    """A runner that may be told to fail."""

    fails = False

    async def run(self, plan, table):
        if self.fails:
            raise RuntimeError("out of memory")
        return await super().run(plan, table)


def target_of(runner: MockRunner) -> tuple[EngineTarget, MockEngine]:
    engine = MockEngine(runner)
    return EngineTarget(engine, SAID, vocab_size=SHAPE.vocab_size, seed=1), engine


def profiled(config: SweepConfig = SMALL, shape: RunnerInfo = SHAPE, *told) -> Profile:
    async def run() -> Profile:
        target, _ = target_of(MockRunner(shape, TIMING))
        async with target:
            return await sweep(target, config, *told)

    return run_virtual(run())


@pytest.fixture(scope="module")
def small() -> Profile:
    return profiled()


def test_the_plan_keeps_to_what_the_engine_can_do() -> None:
    limits = Limits(context_length=1024, step_tokens=512, max_batch=8, kv_tokens=4096)
    plan = plan_sweep(SweepConfig(), limits)
    for cell in (*plan.fitted, *plan.held_out):
        assert limits.refusal(cell) is None
    assert all(limits.step_refusal(cell) is None for cell in plan.fitted)
    assert any(isinstance(cell, PrefillCell) and cell.cached_tokens for cell in plan.fitted)
    assert any(isinstance(cell, PrefillCell) and cell.prompts > 1 for cell in plan.fitted)
    assert "decode 16 x 64: the engine runs at most 8 requests at once" in plan.left_out
    assert "prefill 1024: needs 1025 tokens, the context length is 1024" in plan.left_out
    assert "decode 8 x 1024: needs 1042 tokens, the context length is 1024" in plan.left_out
    with_more = plan_sweep(SweepConfig(), replace(limits, context_length=None, kv_tokens=2000))
    assert any("there is room for 2000" in text for text in with_more.left_out)


def test_an_endpoint_is_asked_neither_for_prefixes_it_does_not_show_nor_for_batches_of_prompts() -> None:
    plan = plan_sweep(QUICK, Limits(caches=False, batches_prompts=False))
    prefill = [cell for cell in (*plan.fitted, *plan.held_out) if isinstance(cell, PrefillCell)]
    assert all(cell.prompts == 1 and not cell.cached_tokens for cell in prefill)
    assert max(cell.new_tokens for cell in prefill) == 1024, "longer ones would be beyond the fit"


def test_too_few_cells_are_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"8 prefill and 2 decode cells can be measured, the fit needs 3 of each"
    ):
        plan_sweep(
            replace(QUICK, batches=(1,), contexts=(64, 512, 4096)),
            Limits(context_length=4096, step_tokens=512),
        )
    with pytest.raises(
        ConfigError, match=r"left out: .*one step computes at most 8 tokens \(max_batch_tokens\)"
    ):
        plan_sweep(QUICK, Limits(step_tokens=8))


def test_a_sweep_of_the_mock_engine_finds_its_timing(small: Profile) -> None:
    fitted = LinearPrior.fit(small)
    assert fitted.prefill == pytest.approx((0.02, 1e-4, 2e-8, 0.0), rel=0.02, abs=2e-7)
    assert fitted.decode == pytest.approx((0.02, 3e-4, 1e-7), rel=0.02)
    evaluation = small.evaluation
    assert max(abs(cell.error) for cell in evaluation.cells) < 0.01
    assert max(abs(cell.left_out_error or 0) for cell in evaluation.cells) < 0.02
    assert evaluation.ttft_median_error < 0.005
    assert evaluation.itl_median_error < 0.005
    assert len(evaluation.held_out) == 12
    assert {point.latency for point in evaluation.held_out} == set(Latency)
    assert (small.engine, small.model, small.hardware, small.step_tokens) == ("mock", "m", "cpu", 512)
    assert small.kv_capacity_tokens == 4096 * 16
    assert all(len(point.samples_s) == SMALL.repeats for point in small.points)


@pytest.mark.virtual
async def test_an_engine_that_fails_names_the_cell() -> None:
    runner = Runner(SHAPE, TIMING)
    target, _ = target_of(runner)
    said = r"^prefill 16: the step that computed this request failed: RuntimeError: out of memory"
    async with target:
        await target.prefill(PrefillCell(16))
        runner.fails = True
        with pytest.raises(EngineError, match=said):
            await measure(target, plan_sweep(SMALL, target.limits), SMALL)


def test_time_that_runs_out_leaves_cells_out_and_too_little_of_it_is_refused() -> None:
    profile = profiled(replace(SMALL, max_seconds=6.0))
    evaluation = profile.evaluation
    assert "decode 16 x 1024: no time left (--max-seconds 6)" in evaluation.left_out_cells
    assert ProfiledModel(profile).decode_step_s(1, 64) == pytest.approx(0.0203, rel=0.01)
    with pytest.raises(ConfigError, match=r"--max-seconds 0\.1: 2 prefill and 1 decode cells were measured"):
        profiled(replace(SMALL, max_seconds=0.1))


def test_a_profile_survives_its_file_and_has_a_page(small: Profile, tmp_path: Path) -> None:
    small.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == small
    page = make_page(small)
    assert page.count("<figure") == 5
    assert "decode 16 x 512" in page
    assert "http" not in page
    assert "&quot;kind&quot;:&quot;dots&quot;" in page
