"""Engines with KV tiers: the mock engine's KV tells of every token which prefix it belongs to, so wrong KV is an error."""

import asyncio

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.core.types.requests import FinishReason
from penstock.engine.kv_tiers import KvConfig, TierSize, tier_maker
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv import host_arena
from penstock.testing.engines.probe import EngineProbe, make_request
from penstock.testing.loop import run_async
from tests.support.held_tier import HeldTier

SIZE = 4


def engine(*, blocks=16, make_tiers=None, host="64x", **config):
    shape = RunnerInfo(
        num_blocks=blocks, block_size=SIZE, context_length=64, vocab_size=500, kv_bytes_per_block=8 * SIZE
    )
    make_tiers = make_tiers or tier_maker(KvConfig(host=host))
    return mock_engine(shape, MockConfig(speedup=1e6), SchedulerConfig(**config), make_tiers=make_tiers)


def held(tier, **fields):
    return engine(make_tiers=lambda info, memory: (tier,), **fields)


def prompt(number, length=30):
    return [1 + (number * 97 + position) % 499 for position in range(length)]


async def answered(probe, name, tokens, **fields):
    (answer,) = await probe.run(make_request(name, tokens, max_tokens=2, **fields))
    assert answer.finish_reason is FinishReason.LENGTH, answer
    return answer


async def until(condition):
    while not condition():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.0005)


async def idle(probe):
    """Wait until no copy is under way."""
    await until(lambda: not probe.engine.kv.holders())


async def test_what_left_the_device_is_loaded_from_the_host():
    async with EngineProbe(engine()) as probe:
        first = await answered(probe, "first", prompt(0))
        for number in range(1, 9):  # 8 blocks each, of 16
            await answered(probe, f"other{number}", prompt(number))
            await idle(probe)
        kv = probe.engine.kv
        again = await answered(probe, "again", prompt(0))
        assert again.token_ids == first.token_ids
        assert again.cached_tokens == 28, "all full blocks but the last token's"
        assert kv.tokens[0] == 28
        assert probe.engine.load().onboarded_tokens[0] == 28
        (counts,) = kv.counts
        assert counts.missing_blocks == counts.corrupt_blocks == 0
        assert (counts.tier, counts.hit_tokens, counts.loads, counts.loaded_blocks) == (
            Tier.HOST,
            28,
            1,
            7,
        )
        assert counts.cached_blocks == counts.offloaded_blocks == 9 * 7
        assert (counts.total_blocks, counts.block_bytes) == (64 * 16, 8 * SIZE)
        probe.engine.scheduler.check()


async def test_the_break_even_of_each_tier_is_said_before_the_first_request(tmp_path, capsys):
    config = KvConfig.parse({"host": "4x", "disk": f"{tmp_path}/kv:4x"}, source="t")
    async with EngineProbe(engine(blocks=32, make_tiers=tier_maker(config))) as probe:
        said = "".join(capsys.readouterr())
        lines = [line for line in said.splitlines() if "kv_tier_break_even" in line]
        assert [f"tier={tier}" in line for tier, line in zip(("host", "disk"), lines, strict=True)] == [
            True,
            True,
        ]
        assert all("measured_by=probe" in line and "not yet" not in line for line in lines)
        load = probe.engine.load()
        assert (load.steps, load.prefilled_tokens, load.cached_blocks, load.active_blocks) == (0, 0, 0, 0)
        assert [counts.cached_blocks for counts in probe.engine.kv.counts] == [0, 0]
        answer = await answered(probe, "first", prompt(0))
        assert answer.cached_tokens == 0, "a probe leaves nothing behind"


async def test_few_device_blocks_are_pinned_for_offloads_and_the_others_follow():
    tier = HeldTier()
    async with EngineProbe(held(tier, blocks=32)) as probe:
        await answered(probe, "first", prompt(0))
        await answered(probe, "second", prompt(1))
        sizes = []
        while tier.offloads:
            assert len(probe.engine.kv.holders()) <= 32 // 8
            sizes.append(len(tier.offloads[0][1]))
            tier.end_offload()
        assert sum(sizes) == 14
        assert probe.engine.kv.counts[0].dropped_blocks == 0


@pytest.mark.parametrize(("text", "why"), [("1B", "less than one block"), ("99999x", "at most 10,000 times")])
def test_sizes_that_no_tier_can_have_are_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        TierSize.parse(text).blocks(100, 1024)


async def test_a_tier_larger_than_the_hosts_memory_is_refused_before_it_takes_any(monkeypatch):
    monkeypatch.setattr(host_arena, "free_memory_bytes", lambda: 1 << 29)
    probe = engine(blocks=2_000, host="9000x")
    with pytest.raises(ConfigError, match=r"kv\.host: 18,000,000 blocks of 32 bytes .* free"):
        await probe.start()
    await probe.close()


def test_a_path_that_no_file_can_have_is_said_once_with_the_fix(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link.aggregated.0").symlink_to(tmp_path / "nowhere" / "kv")
    for path, said in (
        ("file/below/kv", f"{tmp_path}/file/below: making the directory failed: not a directory (errno 20)"),
        (
            "link",
            f"{tmp_path}/link.aggregated.0: opening failed: no such file or directory (errno 2)",
        ),
    ):
        config = KvConfig.parse({"disk": f"{tmp_path}/{path}:4x"}, source="t")
        with pytest.raises(ConfigError) as caught:
            run_async(engine(make_tiers=tier_maker(config, worker="aggregated.0")).start())
        text = caught.value.message
        assert text.startswith(f"kv.disk: {said}; name a file in a directory of a disk that user ")
        assert text.count(str(tmp_path)) == 1
