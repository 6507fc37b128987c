"""Engines with KV tiers: the mock engine's KV tells of every token which prefix it belongs to, so wrong KV is an error."""

import asyncio

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockStored, Tier
from penstock.core.types.requests import FinishReason
from penstock.engine.kv_tiers import KvConfig, TierSize, tier_maker
from penstock.engine.mock.engine import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.host import memory
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


def offloaded(tier):
    while tier.offloads:
        tier.end_offload()


def test_what_left_the_device_is_loaded_from_the_host():
    async def main():
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

    run_async(main())


def test_the_break_even_of_each_tier_is_said_before_the_first_request(tmp_path, capsys):
    async def main():
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

    run_async(main())


def test_events_name_the_tier_before_the_device_gives_the_block_up():
    async def main():
        async with EngineProbe(engine()) as probe:
            await answered(probe, "first", prompt(0))
            await idle(probe)
            await answered(probe, "second", prompt(1))
            tiers = [event.tier for event in probe.events if isinstance(event, BlockStored)]
            assert tiers[:2] == [Tier.DEVICE, Tier.HOST]
            assert probe.info.lower_tier_blocks == 64 * 16

    run_async(main())


def test_a_request_computes_what_did_not_arrive():
    async def main():
        tier = HeldTier()
        async with EngineProbe(held(tier)) as probe:
            first = await answered(probe, "first", prompt(0))
            offloaded(tier)
            probe.engine.pool.reset()
            task = asyncio.create_task(answered(probe, "again", prompt(0)))
            await until(lambda: tier.loads)
            tier.loads[0].end(0)
            again = await task
            assert again.token_ids == first.token_ids
            assert again.cached_tokens == 0
            assert probe.engine.kv.counts[0].missing_blocks == 7
            probe.engine.scheduler.check()

    run_async(main())


def test_others_run_while_a_load_is_under_way():
    async def main():
        tier = HeldTier()
        async with EngineProbe(held(tier, blocks=64)) as probe:
            await answered(probe, "first", prompt(0))
            offloaded(tier)
            probe.engine.pool.reset()
            probe.submit(make_request("again", prompt(0), max_tokens=2))
            probe.submit(make_request("other", prompt(1), max_tokens=2))
            await probe.step()
            await probe.step()
            assert probe.answers["other"].finish_reason is FinishReason.LENGTH
            assert len(tier.loads) == 1
            assert not tier.loads[0].is_cancelled
            assert not probe.answers["again"].token_ids
            tier.loads[0].end()
            await probe.finish()

    run_async(main())


def test_targets_of_an_aborted_load_stay_referenced_until_it_ended():
    async def main():
        tier = HeldTier()
        async with EngineProbe(held(tier)) as probe:
            await answered(probe, "first", prompt(0))
            offloaded(tier)
            probe.engine.pool.reset()
            probe.submit(make_request("again", prompt(0), max_tokens=2))
            scheduler = probe.engine.scheduler
            assert scheduler.plan() is None, "all it has to do is wait"
            (load,) = tier.loads
            probe.abort("again")
            assert load.is_cancelled
            assert {*load.targets} <= {*probe.engine.pool.references()}
            scheduler.check()
            load.end(3)
            assert not probe.engine.pool.references()
            assert scheduler.plan() is None
            scheduler.check()

    run_async(main())


def test_a_late_load_is_given_up_and_computed(monkeypatch):
    monkeypatch.setattr("penstock.kv.manager.worth._LATE_MARGIN_S", 0.0)

    async def main():
        tier = HeldTier()
        async with EngineProbe(held(tier)) as probe:
            first = await answered(probe, "first", prompt(0))
            offloaded(tier)
            probe.engine.pool.reset()
            task = asyncio.create_task(answered(probe, "again", prompt(0)))
            await until(lambda: tier.loads and tier.loads[0].is_cancelled)
            tier.loads[0].end(0)
            assert (await task).token_ids == first.token_ids
            assert probe.engine.kv.counts[0].late_loads == 1

    run_async(main())


def loading_by_chunks(tier):
    """A probe whose tier keeps the 7 full blocks of prompt 0 that the device lacks."""
    tier.chunk_blocks = 2
    return EngineProbe(held(tier, blocks=64))


async def forget_on_device(probe, tier):
    first = await answered(probe, "first", prompt(0))
    offloaded(tier)
    probe.engine.pool.reset()
    return first


def test_chunks_are_published_as_they_arrive_and_an_abort_keeps_them():
    async def main():
        tier = HeldTier()
        async with loading_by_chunks(tier) as probe:
            await forget_on_device(probe, tier)
            probe.submit(make_request("again", prompt(0), max_tokens=2))
            scheduler, pool = probe.engine.scheduler, probe.engine.pool
            assert scheduler.plan() is None
            tier.loads[0].end()
            assert scheduler.plan() is None, "it goes on waiting"
            assert pool.num_cached == 2, "others may use what has come"
            probe.submit(make_request("other", prompt(0, 11), max_tokens=2))
            while probe.answers["other"].finish_reason is None:
                await probe.step()
            assert probe.answers["other"].cached_tokens == 8
            tier.loads[1].end()
            scheduler.plan()
            probe.abort("again")
            for load in tier.loads[2:]:
                assert load.is_cancelled
                load.end(0)
            scheduler.check()
            assert len(pool.match(block_hashes(prompt(0), SIZE))) == 4

    run_async(main())


def test_a_deadline_or_a_corrupt_block_keeps_the_chunks_before_it(monkeypatch):
    monkeypatch.setattr("penstock.kv.manager.worth._LATE_MARGIN_S", 0.05)

    async def main(is_late):
        tier = HeldTier()
        async with loading_by_chunks(tier) as probe:
            first = await forget_on_device(probe, tier)
            task = asyncio.create_task(answered(probe, "again", prompt(0)))
            await until(lambda: tier.loads)
            tier.loads[0].end()
            if is_late:
                await until(lambda: tier.loads[2].is_cancelled)
            tier.loads[1].end(0 if is_late else 1)
            tier.loads[2].end(0)
            again = await task
            assert again.token_ids == first.token_ids
            assert again.cached_tokens == (8 if is_late else 12)
            (counts,) = probe.engine.kv.counts
            assert (counts.loads, counts.loaded_blocks, counts.missing_blocks) == (
                (1, 2, 5) if is_late else (1, 3, 4)
            )
            probe.engine.scheduler.check()

    run_async(main(is_late=True))
    run_async(main(is_late=False))


def test_loading_that_takes_longer_than_computing_is_left():
    async def main():
        tier = HeldTier(seconds_per_block=1e3)
        async with EngineProbe(held(tier)) as probe:
            await answered(probe, "first", prompt(0))
            offloaded(tier)
            probe.engine.pool.reset()
            again = await answered(probe, "again", prompt(0))
            assert again.cached_tokens == 0
            assert not tier.loads

    run_async(main())


def test_few_device_blocks_are_pinned_for_offloads_and_the_others_follow():
    async def main():
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

    run_async(main())


def test_blocks_evicted_before_they_were_copied_are_shed():
    async def main():
        tier = HeldTier()
        async with EngineProbe(held(tier, blocks=32)) as probe:
            await answered(probe, "first", prompt(0))
            probe.engine.pool.reset()
            tier.end_offload()
            assert not tier.offloads
            (counts,) = probe.engine.load().kv_tiers
            assert (counts.offloaded_blocks, counts.dropped_blocks) == (4, 3)

    run_async(main())


def test_a_request_that_waits_for_pinned_blocks_runs_when_they_are_copied():
    async def main():
        tier = HeldTier()
        async with EngineProbe(held(tier, blocks=8)) as probe:
            await answered(probe, "first", prompt(0, length=20))
            assert len(tier.offloads[0][1]) == 1
            task = asyncio.create_task(answered(probe, "second", prompt(1, length=29)))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not probe.answers["second"].token_ids, "8 blocks, one of them pinned"
            offloaded(tier)
            await task

    run_async(main())


def test_bits_that_flip_in_the_host_are_found_and_computed():
    async def main():
        async with EngineProbe(engine()) as probe:
            first = await answered(probe, "first", prompt(0))
            await idle(probe)
            probe.engine.pool.reset()
            (tier,) = probe.engine.kv.tiers
            tier._memory.own[tier._extent.layout.data_offset :].reshape(-1, 8 * SIZE)[2, 5] ^= 1
            again = await answered(probe, "again", prompt(0))
            assert again.token_ids == first.token_ids
            assert again.cached_tokens == 8, "two blocks before the flipped one"
            assert probe.engine.kv.counts[0].corrupt_blocks == 1
            await idle(probe)
            tier.check()

    run_async(main())


def test_a_loaded_prompt_of_whole_blocks_and_one_token_answers():
    async def main():
        async with EngineProbe(engine()) as probe:
            first = await answered(probe, "first", prompt(0, length=4 * SIZE + 1))
            await idle(probe)
            probe.engine.pool.reset()
            again = await answered(probe, "again", prompt(0, length=4 * SIZE + 1))
            assert (again.token_ids, again.cached_tokens) == (first.token_ids, 4 * SIZE)

    run_async(main())


def test_a_cleared_cache_is_cleared_in_every_tier():
    async def main():
        async with EngineProbe(engine()) as probe:
            await answered(probe, "first", prompt(0))
            await idle(probe)
            probe.engine.clear_cache()
            again = await answered(probe, "again", prompt(0))
            assert again.cached_tokens == 0

    run_async(main())


def test_the_same_blocks_are_copied_once():
    async def main():
        async with EngineProbe(engine(blocks=64)) as probe:
            for number in range(3):
                await answered(probe, f"r{number}", prompt(0))
                await idle(probe)
            assert probe.engine.kv.counts[0].offloaded_blocks == 7

    run_async(main())


def test_a_host_tier_smaller_than_the_load_keeps_the_newest():
    async def main():
        async with EngineProbe(engine(host="1x")) as probe:
            rng = np.random.default_rng(0)
            for turn in range(60):
                await answered(probe, f"r{turn}", prompt(int(rng.integers(0, 6))))
                probe.engine.scheduler.check()
            await idle(probe)
            assert probe.engine.kv.tokens[0] > 0
            assert probe.engine.kv.counts[0].corrupt_blocks == 0

    run_async(main())


def test_close_ends_copies_under_way():
    async def main():
        async with EngineProbe(engine(blocks=64)) as probe:
            for number in range(8):
                probe.submit(make_request(f"r{number}", prompt(number), max_tokens=1))
            await answered(probe, "last", prompt(9))
        await probe.engine.close()

    run_async(main())


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("8GiB", 8 << 20), ("1.5MiB", 1536), ("5x", 50_000), ("0.5x", 5_000), ("2048B", 2), ("0", 0), (0, 0)],
)
def test_sizes(text, blocks):
    assert TierSize.parse(text).blocks(10_000, 1024) == blocks


@pytest.mark.parametrize(
    "text", ["8", 5, "-1GiB", "8 gigs", "x", None, True, [], "1e9GiB", "nan", "8GiB GiB"]
)
def test_sizes_without_a_unit_are_refused(text):
    with pytest.raises(ConfigError, match="with its unit"):
        KvConfig.parse({"host": text}, source="t")


@pytest.mark.parametrize(("text", "why"), [("1B", "less than one block"), ("99999x", "at most 10,000 times")])
def test_sizes_that_no_tier_can_have_are_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        TierSize.parse(text).blocks(100, 1024)


def test_tiers_that_are_only_simulated_are_refused():
    with pytest.raises(ConfigError, match=r"disk: 5x and no path; give both"):
        tier_maker(KvConfig.model_validate({"disk": "5x"}))
    with pytest.raises(ConfigError, match=r"object: 5x and no url; give both"):
        tier_maker(KvConfig.model_validate({"object": "5x"}))
    assert tier_maker(KvConfig()) is None


def test_an_engine_without_kv_memory_is_refused():
    async def main():
        shape = RunnerInfo(num_blocks=8, block_size=SIZE, context_length=32, vocab_size=500)
        probe = mock_engine(shape, make_tiers=tier_maker(KvConfig(host="1GiB")))
        with pytest.raises(ConfigError, match=r"mock\.kv_bytes_per_block"):
            await probe.start()
        await probe.close()

    run_async(main())


def test_a_tier_larger_than_the_hosts_memory_is_refused_before_it_takes_any(monkeypatch):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 1 << 29)

    async def main():
        probe = engine(blocks=2_000, host="9000x")
        with pytest.raises(ConfigError, match=r"kv\.host: 18,000,000 blocks of 32 bytes .* free"):
            await probe.start()
        await probe.close()

    run_async(main())


def test_eviction_prices_a_lost_block_by_measured_speeds():
    async def main():
        told = []
        async with EngineProbe(held(HeldTier(seconds_per_block=1e-9), blocks=64)) as probe:
            probe.engine.pool.set_price = told.append
            for number in range(10):
                await probe.run(make_request(f"r{number}", prompt(number, 40), max_tokens=1))
        (price,) = told
        assert price.token_s > 0
        assert price.load_s == pytest.approx(1e-9 / 4)
        assert price.deeper_s / price.token_s == pytest.approx(0.65e-9 / 14e-6)

    run_async(main())


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
