"""A profile goes through its points and predicts the ones it was not shown."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.perf.model.hardware import Dtype, find_hardware
from penstock.perf.model.model_config import shape_of
from penstock.perf.model.parallel import Parallel
from penstock.perf.profile.profile import DecodePoint, LinearPrior, PrefillPoint, Profile, ProfiledModel
from penstock.perf.roofline.roofline import Roofline

TABLES = json.loads((Path(__file__).parents[3] / "data" / "latency_tables.json").read_text())
SIZES = {"70B": (8192, 28672, 64, 80), "8B": (4096, 14336, 32, 32)}


def profile_of(table: dict) -> Profile:
    return Profile(
        engine=table["model"],
        prefill=tuple(
            PrefillPoint(new_tokens=int(n), seconds=ms / 1e3) for n, ms in table["prefill_ms"].items()
        ),
        decode=tuple(
            DecodePoint(context=int(cell.split("x")[0]), batch=int(cell.split("x")[1]), seconds=ms / 1e3)
            for cell, ms in table["decode_ms"].items()
        ),
    )


def prior_of(table: dict) -> Roofline:
    hidden, intermediate, heads, layers = SIZES["8B" if "8B" in table["model"] else "70B"]
    config = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "num_hidden_layers": layers,
        "vocab_size": 128256,
    }
    return Roofline(
        shape_of(config, name="llama"),
        find_hardware(table["system"]),
        Parallel(tp=table["tp"]),
        Dtype(table["weights"]),
    )


def without(points: tuple, index: int) -> tuple:
    return points[:index] + points[index + 1 :]


def residuals(model: ProfiledModel, profile: Profile) -> dict[str, float]:
    """Give predicted / measured - 1 per point of `profile`."""
    return {point.name: model.point_s(point) / point.seconds - 1 for point in profile.points}


@pytest.mark.parametrize(
    "table", TABLES, ids=lambda t: f"{t['model'].split('/')[1]}-{t['system']}-tp{t['tp']}"
)
def test_leave_one_out(table: dict) -> None:
    profile, prior = profile_of(table), prior_of(table)
    fitted = residuals(ProfiledModel(profile, prior), profile)
    assert max(map(abs, fitted.values())) < 0.10
    left_out: dict[str, float] = {}
    for kind in ("prefill", "decode"):
        points = getattr(profile, kind)
        empty = {"prefill": (), "decode": ()}
        for index in range(len(points)):
            rest = msgspec.structs.replace(profile, **{kind: without(points, index)})
            held = msgspec.structs.replace(profile, **(empty | {kind: points[index : index + 1]}))
            left_out |= residuals(ProfiledModel(rest, prior), held)
    assert max(map(abs, left_out.values())) < 0.20, left_out


def test_plain_engine_is_recovered_exactly() -> None:
    truth = LinearPrior(prefill=(0.005, 1e-4, 1e-8, 0.0), decode=(0.004, 2e-4, 1e-7))
    profile = Profile(
        engine="plain",
        prefill=tuple(PrefillPoint(new_tokens=n, seconds=truth.prefill_s(n)) for n in (16, 128, 1024, 4096)),
        decode=tuple(
            DecodePoint(batch=b, context=c, seconds=truth.decode_step_s(b, b * c))
            for b in (1, 8, 32)
            for c in (128, 1024, 4096)
        ),
    )
    model = ProfiledModel(profile)
    assert model.prefill_s(300) == pytest.approx(truth.prefill_s(300), rel=1e-3)
    assert model.prefill_s(100, 1000) == pytest.approx(truth.prefill_s(100, 1000), rel=1e-3)
    assert model.decode_step_s(20, 20 * 700) == pytest.approx(truth.decode_step_s(20, 20 * 700), rel=1e-3)
    assert model.decode_step_s(64, 64 * 9000) == pytest.approx(truth.decode_step_s(64, 64 * 9000), rel=1e-3)
    two = model.prefill_batch_s([(300, 0), (200, 0)])
    assert model.prefill_s(300) < two < model.prefill_s(300) + model.prefill_s(200)


def test_steps_of_many_kinds_are_shared_as_the_prior_shares_them() -> None:
    """An engine that is half as fast as its roofline at all that was measured is so at what was not."""
    prior = prior_of(TABLES[0])
    profile = Profile(
        engine="half",
        prefill=tuple(PrefillPoint(new_tokens=n, seconds=2 * prior.prefill_s(n)) for n in (128, 1024, 8192)),
        decode=tuple(
            DecodePoint(batch=b, context=c, seconds=2 * prior.decode_step_s(b, b * c))
            for b in (1, 16, 256)
            for c in (128, 1024, 4096)
        ),
    )
    model = ProfiledModel(profile, prior)
    chunks = [(512, 0), (300, 2048)]
    assert model.prefill_batch_s(chunks) == pytest.approx(2 * prior.prefill_batch_s(chunks))
    mixed = 2 * prior.mixed_step_s(chunks, 16, 16 * 1024)
    assert model.mixed_step_s(chunks, 16, 16 * 1024) == pytest.approx(mixed)


@pytest.mark.parametrize("batch", [24, 100, 256, 300, 1000])
@pytest.mark.parametrize("context", [200, 5000, 60_000])
def test_decode_is_piecewise_linear_in_context(batch: int, context: int) -> None:
    """Within, below and beyond what was measured, to the last token of the batch."""
    model = ProfiledModel(profile_of(TABLES[0]), prior_of(TABLES[0]))
    tokens = [batch * context + step * 37 for step in range(3)]
    low, middle, high = (model.decode_step_s(batch, n) for n in tokens)
    assert middle - low == pytest.approx(high - middle, rel=1e-6)
    assert low < high


@pytest.mark.parametrize("batch", [3, 7, 100, 300])
def test_decode_has_no_stairs_between_and_beyond_the_points(batch: int) -> None:
    """A mean context is seldom a whole number; sums over many steps need straight lines."""
    model = ProfiledModel(profile_of(TABLES[0]), prior_of(TABLES[0]))
    for context in (200, 5000, 40_000):
        prices = [model.decode_step_s(batch, batch * context + more) for more in range(8)]
        steps = [after - before for before, after in pairwise(prices)]
        assert steps == pytest.approx([steps[0]] * 7, rel=1e-6)


def test_save_and_load(tmp_path: Path) -> None:
    profile = profile_of(TABLES[0])
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    with pytest.raises(ConfigError, match="no such file"):
        Profile.load(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text('{"engine": 3}')
    with pytest.raises(ConfigError, match="not a profile"):
        Profile.load(tmp_path / "bad.json")
    (tmp_path / "old.json").write_text('{"engine": "e", "prefill": [], "decode": [], "schema": 99}')
    with pytest.raises(ConfigError, match="schema 99, expected 1"):
        Profile.load(tmp_path / "old.json")


def test_bad_points() -> None:
    with pytest.raises(ConfigError, match="0 prefill and 0 decode points"):
        ProfiledModel(Profile(engine="e", prefill=(), decode=()))
    with pytest.raises(ConfigError, match="seconds must be > 0"):
        ProfiledModel(
            Profile(
                engine="e",
                prefill=(PrefillPoint(new_tokens=1, seconds=0.0),),
                decode=(DecodePoint(batch=1, context=1, seconds=1.0),),
            )
        )


TRUTH = LinearPrior(prefill=(0.005, 1e-4, 1e-8, 2e-6), decode=(0.004, 2e-4, 1e-7))


def plain_profile(*, extra_prompt_s: float = 0.0, shift: int = 0) -> Profile:
    """Measure `TRUTH`; `shift` moves lengths a little from cell to cell, as prompts in words do."""
    prefill = [
        PrefillPoint(new_tokens=n, cached_tokens=cached, seconds=TRUTH.prefill_s(n, cached))
        for size in (64, 512, 4096)
        for number, cached in enumerate((0, 512, 2048))
        if (n := size + number * shift)
    ]
    batched = [
        PrefillPoint(
            new_tokens=n,
            prompts=prompts,
            seconds=TRUTH.prefill_batch_s([(n, 0)] * prompts) + (prompts - 1) * extra_prompt_s,
        )
        for n, prompts in ((64, 4), (128, 4), (64, 16))
    ]
    decode = [
        DecodePoint(batch=b, context=c, seconds=TRUTH.decode_step_s(b, b * c))
        for number, b in enumerate((1, 4, 16))
        for size in (64, 512, 2048)
        if (c := size + number * shift)
    ]
    return Profile(engine="plain", prefill=(*prefill, *batched), decode=tuple(decode))


def test_cached_prefixes_and_further_prompts_have_their_price() -> None:
    model = ProfiledModel(plain_profile(extra_prompt_s=0.003))
    assert model.prefill_s(64, 4000) == pytest.approx(TRUTH.prefill_s(64, 4000), rel=1e-3)
    two = [(100, 0), (300, 600)]
    assert model.prefill_batch_s(two) == pytest.approx(TRUTH.prefill_batch_s(two) + 0.003, rel=1e-3)
    assert model.prefill_batch_s([*two, (0, 0)]) == model.prefill_batch_s(two)
    assert model.mixed_step_s([(64, 0)], 4, 256) == pytest.approx(
        TRUTH.prefill_s(64) + TRUTH.decode_step_s(4, 256) - 0.004, rel=1e-3
    )


def test_lengths_that_are_nearly_equal_are_one() -> None:
    model = ProfiledModel(plain_profile(shift=3))
    assert model._contexts == [67, 515, 2051]
    assert len(model._prefill_ratio[0]) == 3
    assert max(map(abs, residuals(model, plain_profile(shift=3)).values())) < 0.01


@pytest.mark.parametrize("batch", [1, 3, 16, 40])
def test_every_batch_is_piecewise_linear_in_context_also_beyond_the_points(batch: int) -> None:
    """The simulator sums decode steps piece by piece: kinks lie at the measured contexts and nowhere else."""
    model = ProfiledModel(profile_of(TABLES[0]), prior_of(TABLES[0]))
    columns = [0, *model._contexts, 200_000]
    for start, end in pairwise(columns):
        step = (end - start) // 4
        prices = [model.decode_step_s(batch, batch * (start + number * step)) for number in range(1, 4)]
        assert prices[1] - prices[0] == pytest.approx(prices[2] - prices[1], rel=1e-6, abs=1e-12)


def test_noise_never_makes_a_step_free() -> None:
    noisy = (
        PrefillPoint(new_tokens=512, cached_tokens=512, seconds=5.76e-05),
        PrefillPoint(new_tokens=512, seconds=0.0595),
        PrefillPoint(new_tokens=500, seconds=0.0114),
        PrefillPoint(new_tokens=192, cached_tokens=1536, seconds=0.00177),
        PrefillPoint(new_tokens=192, seconds=0.994),
    )
    decode = (DecodePoint(context=64, batch=1, seconds=0.01), DecodePoint(context=512, batch=4, seconds=0.02))
    profile = Profile(engine="noisy", prefill=noisy, decode=decode)
    assert LinearPrior.fit(profile).prefill_s(64) > 0
    assert ProfiledModel(profile).prefill_s(64) > 0
