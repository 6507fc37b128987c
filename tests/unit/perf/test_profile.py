"""A profile goes through its points and predicts the ones it was not shown."""

import json
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel
from penstock.perf.profile import DecodePoint, LinearPrior, PrefillPoint, Profile, ProfiledModel
from penstock.perf.roofline import Roofline

TABLES = json.loads((Path(__file__).parents[2] / "data" / "latency_tables.json").read_text())


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
    shape = find_shape("llama-3.1-8b" if "8B" in table["model"] else "llama-3.1-70b")
    return Roofline(shape, find_hardware(table["system"]), Parallel(tp=table["tp"]), Dtype(table["weights"]))


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


@pytest.mark.parametrize("batch", [3, 100, 256, 1000])
@pytest.mark.parametrize("context", [200, 5000, 60_000])
def test_decode_is_piecewise_linear_in_context(batch: int, context: int) -> None:
    """Within, below and beyond what was measured, to the last token of the batch."""
    model = ProfiledModel(profile_of(TABLES[0]), prior_of(TABLES[0]))
    tokens = [batch * context + step * 37 for step in range(3)]
    low, middle, high = (model.decode_step_s(batch, n) for n in tokens)
    assert middle - low == pytest.approx(high - middle, rel=1e-6)
    assert low < high


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
    assert max(map(abs, residuals(model, plain_profile(shift=3)).values())) < 0.01


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
