"""KV tiers below a real vLLM: outputs, hits after eviction, what routers hear, loads that fail, and restarts."""

import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core.types.events import Holder, Tier
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.resources import HostArena
from penstock.engine.kv_tiers import KvConfig
from penstock.engine.vllm.tiers.settings import TierSettings
from penstock.graph import RoleSpec
from penstock.kv.groups.group import GroupKind, KvGroup
from tests.vllm.conftest import BLOCK, vllm_processes
from tests.vllm.indexed import KEY, Indexed
from tests.vllm.test_adapters import merged
from tests.vllm.test_engine import greedy
from tests.vllm.test_engine import prompt as random_prompt

KV_BLOCKS = 40
LENGTH = 400
CACHED = LENGTH // BLOCK * BLOCK
BLOCKS = LENGTH // BLOCK
TOKENS = 8


def tiers(**kv):
    return {"kv_blocks": KV_BLOCKS, "hash_key": KEY, "kv": KvConfig.model_validate(kv)}


@pytest.fixture(scope="module")
def model(model_dir):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tiered(started, spec_of, adapter_dir):
    args = {"lora_modules": {"shift": str(adapter_dir)}}
    return Indexed(started(spec_of(**tiers(host="25x"), adapters=("shift",), args=args)))


def counts_of(indexed, tier=Tier.HOST):
    return next(counts for counts in indexed.running.load().kv_tiers if counts.tier is tier)


def evict(indexed, seed):
    """Run prompts that take all of the device's blocks; `seed` and the next ones are theirs."""
    for number in range(KV_BLOCKS // BLOCKS + 1):
        indexed.run(random_prompt(LENGTH, seed + number), tokens=1)


def test_what_was_evicted_comes_from_the_host_and_gives_the_same_tokens(tiered, model):
    prompts = [random_prompt(LENGTH, seed) for seed in range(3)]
    expected = [greedy(model, ids, TOKENS) for ids in prompts]
    assert tiered.run(*prompts, tokens=TOKENS) == [0, 0, 0]
    assert tiered.emitted == expected
    evict(tiered, 100)
    before = counts_of(tiered)
    assert tiered.run(*prompts, tokens=TOKENS) == [CACHED] * 3
    assert tiered.emitted == expected
    after = counts_of(tiered)
    assert after.hit_tokens - before.hit_tokens == 3 * CACHED
    assert after.loaded_blocks - before.loaded_blocks == 3 * BLOCKS
    assert (after.missing_blocks, after.corrupt_blocks, after.is_off) == (0, 0, False)
    assert tiered.running.load().onboarded_tokens == (after.hit_tokens, 0, 0)


def test_routers_hear_of_blocks_that_only_the_host_has(tiered):
    ids = random_prompt(LENGTH, 200)
    tiered.run(ids)
    evict(tiered, 210)
    found = tiered.tree.match_tokens(ids, BLOCK, key=KEY).tiers[:, 0]
    assert found.tolist() == [0, BLOCKS, 0, 0], "blocks by tier, the device first"
    tiered.check()


def test_salts_and_adapters_share_nothing(tiered, model, model_dir, adapter_dir):
    ids = random_prompt(LENGTH, 300)
    adapted = merged(model_dir, adapter_dir)
    cases = [
        ({}, greedy(model, ids, TOKENS)),
        ({"salt": b"tenant"}, greedy(model, ids, TOKENS)),
        ({"adapter": "shift"}, greedy(adapted, ids, TOKENS)),
    ]
    for fields, expected in cases:
        assert tiered.run(ids, tokens=TOKENS, **fields) == [0], "nobody else's blocks"
        assert tiered.emitted == [expected]
    evict(tiered, 310)
    for fields, expected in cases:
        assert tiered.run(ids, tokens=TOKENS, **fields) == [CACHED], "its own, from the host"
        assert tiered.emitted == [expected]


def check_aborts_leave_nothing(indexed, model, evict):
    """Abort requests with a load under way; then their prompts are loaded and the answers right, and nothing is held."""
    prompts = [random_prompt(LENGTH, seed) for seed in range(400, 403)]
    expected = [greedy(model, ids, TOKENS) for ids in prompts]
    indexed.run(*prompts)
    evict(indexed, 410)
    loads = counts_of(indexed).loads
    for steps in (0, 1, 1, 2, 3):
        for ids in prompts:
            indexed.abort(ids, steps=steps)
    evict(indexed, 420)
    assert counts_of(indexed).loads > loads
    assert indexed.run(*prompts, tokens=TOKENS) == [CACHED] * 3
    assert indexed.emitted == expected
    load = indexed.running.load()
    assert (load.running_requests, load.waiting_requests, load.active_blocks) == (0, 0, 0)


def test_requests_that_are_aborted_with_a_load_under_way_leave_nothing(tiered, model):
    check_aborts_leave_nothing(tiered, model, evict)


def test_preempted_requests_go_on_the_same(tiered):
    prompts = [random_prompt(LENGTH, seed) for seed in range(500, 503)]
    expected = []
    for ids in prompts:
        tiered.run(ids, tokens=100)
        expected += tiered.emitted
    evict(tiered, 510)
    before = tiered.running.load().preemptions
    assert tiered.run(*prompts, tokens=100) == [CACHED] * 3
    assert tiered.emitted == expected
    assert tiered.running.load().preemptions > before, (
        "three contexts of 500 tokens are more than the device has"
    )


def test_corrupt_blocks_are_computed(tiered, model):
    ids = random_prompt(LENGTH, 600)
    tiered.run(ids)
    evict(tiered, 610)
    before = counts_of(tiered)
    damage_host()
    tiered.run(ids, tokens=TOKENS)
    assert tiered.emitted == [greedy(model, ids, TOKENS)]
    after = counts_of(tiered)
    assert after.corrupt_blocks > before.corrupt_blocks
    assert after.missing_blocks > before.missing_blocks
    evict(tiered, 620)
    assert tiered.run(ids, tokens=TOKENS) == [CACHED], "it was offloaded again"
    assert tiered.emitted == [greedy(model, ids, TOKENS)]


def test_a_killed_worker_is_warm_again_from_its_disk(started, spec_of, tmp_path, model):
    prompts = [random_prompt(LENGTH, seed) for seed in range(700, 704)]
    expected = [greedy(model, ids, TOKENS) for ids in prompts]
    spec = spec_of(**tiers(host="2x", disk=f"{tmp_path}/kv:64MiB"))
    first = Indexed(started(spec))
    for ids, tokens in zip(prompts, expected, strict=True):
        first.run(ids, tokens=TOKENS)
        assert first.emitted == [tokens]
    assert counts_of(first, Tier.DISK).cached_blocks == 4 * BLOCKS
    for process in vllm_processes():
        process.send_signal(signal.SIGKILL)
    again = Indexed(started(spec))
    assert again.run(*prompts, tokens=TOKENS) == [CACHED] * 4
    assert again.emitted == expected
    disk = counts_of(again, Tier.DISK)
    assert (disk.hit_tokens, disk.corrupt_blocks) == (4 * CACHED, 0)
    assert again.known(prompts[0]) == CACHED


def test_a_workers_blocks_in_the_hosts_arena_outlive_it_and_serve_another(started, spec_of, model):
    prompts = [random_prompt(LENGTH, seed) for seed in range(800, 804)]
    expected = [greedy(model, ids, TOKENS) for ids in prompts]
    role = RoleSpec.model_validate({"engine": "vllm", "replicas": 2, "kv": {"host": "128MiB"}})
    with HostArena({Role.AGGREGATED: role}) as arena:
        first, second = (
            spec_of(**tiers(host="128MiB"), host_part=arena.part(Role.AGGREGATED, number), index=number)
            for number in range(2)
        )
        one = Indexed(started(first))
        processes = vllm_processes()
        other = Indexed(started(second, beside=True))
        assert one.running.info.kv_holders == other.running.info.kv_holders
        for ids, tokens in zip(prompts, expected, strict=True):
            one.run(ids, tokens=TOKENS)
            assert one.emitted == [tokens]
        other.wait_until(lambda _: all(other.known(ids) == CACHED for ids in prompts))
        assert other.holders == {Holder.HOST}, "idle, it hears and tells of what the other one has kept"
        kept = counts_of(one)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        assert other.run(*prompts, tokens=TOKENS) == [CACHED] * 4
        assert other.emitted == expected
        host = counts_of(other)
        assert (host.hit_tokens, host.corrupt_blocks) == (4 * CACHED, 0)
        assert host.total_blocks == kept.total_blocks
        assert other.known(prompts[0]) == CACHED


def damage_host():
    """Flip bits of all blocks in the largest arena of vLLM's processes: the host tier's."""
    files = []
    for process in vllm_processes():
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                if "penstock-arena" in str(fd.readlink()):
                    files.append((fd.stat().st_size, str(fd)))
            except FileNotFoundError:
                continue
    size, path = max(files)
    memory = np.memmap(path, np.uint8, "r+", shape=(size,))
    memory[:: 1 << 12] ^= 1
    memory.flush()


def test_the_scheduler_hears_of_every_step_also_of_those_that_report_nothing():
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from penstock.engine.vllm.tiers.connector import RankReports, _SchedulerSide, _WorkerSide

    settings = TierSettings(KvConfig(), "worker", "", KEY)
    parallel = SimpleNamespace(rank=0, world_size=1, decode_context_parallel_size=1)
    cache = SimpleNamespace(block_size=BLOCK)
    config = SimpleNamespace(parallel_config=parallel, cache_config=cache)
    groups = [KvGroup(GroupKind.FULL, ("layer",), 1)]
    worker = _WorkerSide(settings, config, None, groups)
    assert worker.ended_requests() == (set(), set())
    report = worker.take_report()
    assert report == RankReports({})
    assert not KVConnectorOutput(kv_connector_worker_meta=report).is_empty(), "vLLM would drop it"
    scheduler = _SchedulerSide(
        settings, config, SimpleNamespace(num_blocks=8, prefix_cache_retention_interval=0), groups
    )
    for _ in range(3):
        scheduler.begin_step(SchedulerOutput.make_empty())
        scheduler.end_step(report)
    assert not scheduler._steps
