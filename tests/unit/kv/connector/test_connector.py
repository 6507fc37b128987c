"""Both sides of a KV connector with a real host tier, or one that a test holds."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.types.events import BlockRemoved, BlockStored, Tier
from penstock.core.wire import hash_list, pack_hashes
from penstock.kv.block_store import Namespace
from penstock.kv.connector import worker as worker_module
from penstock.kv.connector.mirror import TierMirror
from penstock.kv.connector.staging import Staging
from penstock.kv.host_tier import HostTier
from penstock.kv.load_or_compute import MeasuredSpeed
from penstock.kv.slot_file import SlotFile
from penstock.kv.stored_tier import StoredTier
from penstock.seams.kv import KvTier
from tests.support.connected import BLOCK_BYTES, BLOCK_SIZE, WAIT_S, Connected, damage, hashes_of

Maker = Callable[..., Connected]


@pytest.fixture
def connected() -> Iterator[Maker]:
    made: list[Connected] = []

    def make(num_host_blocks: int = 64, **fields: int) -> Connected:
        def tiers(staging: Staging) -> Sequence[KvTier]:
            return [HostTier(staging.blocks, num_host_blocks, BLOCK_SIZE)]

        made.append(Connected(tiers, **fields))
        return made[-1]

    yield make
    for each in made:
        each.close()


def matched(
    scene: Connected, name: str, hashes: "np.ndarray[tuple[int, int], np.dtype[np.uint64]]", cached: int = 0
) -> int | None:
    return scene.scheduler.match(name, hashes, cached, len(hashes) * BLOCK_SIZE + 1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_was_offloaded_is_loaded_into_other_blocks(connected: Maker, num_ranks: int) -> None:
    scene = connected(num_ranks=num_ranks)
    hashes = scene.keep(1, 6)
    assert not scene.pinned
    assert matched(scene, "a", hashes, cached=2) == 4
    scene.scheduler.reserve("a", [[0, 1, 20, 21, 22, 23]], 4)
    assert scene.scheduler.is_loading("a")
    scene.step()
    assert not scene.scheduler.is_loading("a")
    whole = [60, 61, 20, 21, 22, 23]
    scene.fill(whole[:2], 1)
    assert scene.holds(whole, 1)
    (counts,) = scene.scheduler.counts()
    assert (counts.tier, counts.loads, counts.loaded_blocks, counts.missing_blocks) == (Tier.HOST, 1, 4, 0)
    assert (counts.hit_tokens, counts.offloaded_blocks) == (4 * BLOCK_SIZE, 6)


def test_a_request_waits_for_another_ones_load_of_the_same_prefix(connected: Maker) -> None:
    scene = connected()
    hashes = scene.keep(4, 3)
    assert matched(scene, "a", hashes) == 3
    scene.scheduler.reserve("a", [[30, 31, 32]], 3)
    assert matched(scene, "b", hashes) is None
    scene.step()
    assert matched(scene, "b", hashes) == 3, "unless the device has it by now, which the engine says"


def test_a_corrupt_block_ends_the_load_and_the_request_loads_no_more(connected: Maker) -> None:
    scene = connected()
    hashes = scene.keep(5, 4)
    damage(scene.workers[0].tiers[0], hashes[2:3])
    assert matched(scene, "a", hashes) == 4
    scene.scheduler.reserve("a", [[30, 31, 32, 33]], 4)
    scene.step()
    (loaded,) = scene.reports[-1].loaded
    assert (loaded.request_id, loaded.missing) == ("a", (32, 33))
    assert scene.holds([30, 31], 5)
    assert matched(scene, "a", hashes, cached=2) == 0
    assert matched(scene, "b", hashes) == 2, "what is left of it serves others"
    (counts,) = scene.scheduler.counts()
    assert (counts.loaded_blocks, counts.missing_blocks, counts.corrupt_blocks) == (2, 2, 1)
    scene.scheduler.forget("a")
    assert matched(scene, "a", hashes) == 2, "another request of this name"


def test_loads_and_saves_are_compared_with_computing(connected: Maker) -> None:
    scene = connected()
    hashes = scene.keep(6, 4)
    assert matched(scene, "a", hashes) == 4, "tried once, before anything is known"
    scene.scheduler.reserve("a", [[30, 31, 32, 33]], 4)
    scene.step()
    scene.scheduler.prefill.measure(1000, 1e-9)
    assert matched(scene, "b", hashes) == 0
    for _ in range(100):
        scene.scheduler.prefill.measure(1000, 10_000.0)
    assert matched(scene, "b", hashes) == 4


def test_a_short_load_from_the_host_may_be_awaited_by_its_step(connected: Maker) -> None:
    scene = connected()
    hashes = scene.keep(11, 4)
    assert matched(scene, "a", hashes) == 4
    assert not scene.scheduler.is_quick("a"), "nobody knows how long it takes"
    scene.scheduler.reserve("a", [[30, 31, 32, 33]], 4)
    scene.step()
    speeds = scene.scheduler._speeds
    assert speeds[Tier.HOST].is_known
    speeds[Tier.HOST] = MeasuredSpeed(clock=lambda: 0.0)  # the measured one depends on what else runs here
    speeds[Tier.HOST].measure(4, 0.009)
    assert matched(scene, "b", hashes) == 4
    assert scene.scheduler.is_quick("b")
    scene.scheduler.reserve("b", [[40, 41, 42, 43]], 4, is_awaited=True)
    scene.workers[0].submit(scene.scheduler.take_orders())
    assert scene.workers[0].wait_for_awaited(WAIT_S)
    assert scene.holds([40, 41, 42, 43], 11)
    report = scene.workers[0].take_report()
    assert report is not None
    assert [loaded.is_awaited for loaded in report.loaded] == [True]
    scene.scheduler.take_reports({0: report})
    speeds[Tier.HOST].measure(1, 10.0)
    assert matched(scene, "c", hashes) == 4
    assert not scene.scheduler.is_quick("c")


def test_few_device_blocks_are_pinned_and_what_is_evicted_first_is_dropped(connected: Maker) -> None:
    scene = connected(num_blocks=64)
    hashes = hashes_of(7, 20)
    scene.fill(range(20), 7)
    scene.scheduler.commit(hashes, [list(range(20))])
    orders = scene.scheduler.take_orders()
    assert [len(save.block_ids) for save in orders.saves] == [8]
    assert scene.pinned == list(range(8))
    assert scene.scheduler.has_pinned
    assert scene.scheduler.needs_steps
    scene.workers[0].submit(orders)
    scene.evicted = {12}
    while scene.scheduler.needs_steps:
        scene.step()
    (counts,) = scene.scheduler.counts()
    assert (counts.cached_blocks, counts.dropped_blocks) == (12, 8)
    assert not scene.pinned


def test_a_load_of_a_request_that_has_ended_is_cancelled_and_counted(connected: Maker) -> None:
    scene = connected()
    hashes = scene.keep(9, 3)
    assert matched(scene, "a", hashes) == 3
    scene.scheduler.reserve("a", [[30, 31, 32]], 3)
    scene.scheduler.forget("a")
    orders = scene.step()
    assert orders.cancelled == (orders.loads[0].load_id,)
    assert not scene.scheduler.needs_steps
    assert matched(scene, "b", hashes) == 3


def test_a_block_counts_once_every_process_has_its_part() -> None:
    mirror = TierMirror(2)
    hashes = hashes_of(10, 2)
    stored = BlockStored(
        block_hashes=pack_hashes(hashes[:, 0]), parent_block_hash=None, block_size=BLOCK_SIZE, tier=Tier.HOST
    )
    assert mirror.apply(0, [stored]) == []
    assert mirror.locate(Tier.HOST, hashes) == 0
    told = mirror.apply(1, [stored])
    assert [
        (hash_list(each.block_hashes), each.parent_block_hash)
        for each in told
        if isinstance(each, BlockStored)
    ] == [
        ([int(hashes[0, 0])], None),
        ([int(hashes[1, 0])], int(hashes[0, 0])),
    ]
    assert mirror.locate(Tier.HOST, hashes) == 2
    removed = BlockRemoved(block_hashes=pack_hashes(hashes[1:, 0]), tier=Tier.HOST)
    assert mirror.apply(0, [removed]) == [removed]
    assert mirror.apply(1, [removed]) == []
    assert mirror.locate(Tier.HOST, hashes) == 1


def test_a_prefix_in_two_tiers_is_loaded_from_both_and_ends_at_the_first_gap(tmp_path: Path) -> None:
    namespace = Namespace(model_digest="m", dtype="u8", layout="slots", block_size=BLOCK_SIZE)

    def tiers(staging: Staging) -> Sequence[KvTier]:
        disk = SlotFile(tmp_path / "disk", 64 * BLOCK_BYTES, BLOCK_BYTES, namespace)
        host = HostTier(staging.blocks, 4, BLOCK_SIZE)
        return [host, StoredTier(disk, Tier.DISK, staging.blocks, 64)]

    scene = Connected(tiers)
    hashes = scene.keep(1, 8)
    targets = list(range(20, 28))
    for number, damaged in enumerate((None, 2)):
        if damaged is not None:
            damage(scene.workers[0].tiers[0], hashes[damaged : damaged + 1])
        assert matched(scene, f"r{number}", hashes) == 8
        scene.scheduler.reserve(f"r{number}", [targets], 8)
        orders = scene.step()
        assert [(run.tier, len(run.targets)) for run in orders.loads[0].runs] == [
            (Tier.HOST, 4),
            (Tier.DISK, 4),
        ]
        good = targets if damaged is None else targets[:damaged]
        (loaded,) = scene.reports[-1].loaded
        assert list(loaded.missing) == targets[len(good) :]
        assert scene.holds(good, 1)
    host_counts, disk_counts = scene.scheduler.counts()
    assert (host_counts.loaded_blocks, host_counts.missing_blocks) == (4 + 2, 6)
    assert (disk_counts.loaded_blocks, disk_counts.missing_blocks) == (4, 0)
    scene.close()
    again = Connected(tiers)
    assert matched(again, "a", hashes) == 8, "all of it is on the disk, and the scheduler heard so"
    again.close()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 8))]
)
def test_whatever_is_evicted_damaged_or_cancelled_no_wrong_block_arrives(connected: Maker, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = connected(num_host_blocks=24, num_blocks=200, num_ranks=1 + seed % 2)
    lengths = [int(length) for length in rng.integers(1, 12, 6)]
    arrived_blocks = 0
    for turn in range(60):
        prompt = int(rng.integers(len(lengths)))
        hashes = hashes_of(prompt, lengths[prompt])
        name, targets = f"r{turn}", list(range(100, 100 + lengths[prompt]))
        match rng.integers(5):
            case 0 | 1:
                scene.keep(prompt, lengths[prompt])
            case 2:
                damage(scene.workers[0].tiers[0], byte=int(rng.integers(24 * BLOCK_BYTES)))
            case kind:
                if not (count := matched(scene, name, hashes)):
                    continue
                scene.scheduler.reserve(name, [targets], count)
                if kind == 3:
                    scene.scheduler.forget(name)
                scene.reports.clear()
                while scene.scheduler.needs_steps:
                    scene.step()
                missing = {
                    block for report in scene.reports for loaded in report.loaded for block in loaded.missing
                }
                good = [block for block in targets[:count] if block not in missing]
                assert good == targets[: len(good)], "the first that is missing and all after it"
                assert scene.holds(good, prompt)
                arrived_blocks += len(good)
                scene.scheduler.forget(name)
        assert not scene.pinned
    assert arrived_blocks > 20


def test_closing_leaves_a_copy_that_hangs_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_CLOSE_S", 0.2)
    scene = Connected(lambda staging: [HostTier(staging.blocks, 64, BLOCK_SIZE)])
    (worker,), (memory,) = scene.workers, scene.memories
    begun, going_on, ended = threading.Event(), threading.Event(), threading.Event()
    read = memory.read

    def hang(*args: Any) -> None:
        begun.set()
        assert going_on.wait(WAIT_S)
        read(*args)
        ended.set()

    monkeypatch.setattr(memory, "read", hang)
    scene.fill(range(4), 1)
    scene.scheduler.commit(hashes_of(1, 4), [list(range(4))])
    scene.step(is_waiting=False)
    assert begun.wait(WAIT_S)
    worker.close()
    assert not worker._thread.is_alive()
    going_on.set()
    assert ended.wait(WAIT_S), "it writes slots after the end, and they are still there"
