"""Host tiers of one host's workers: what one offloads another loads, whatever the first does meanwhile."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.core.errors import ConfigError
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Holder, Tier
from penstock.core.wire import unpack_hashes
from penstock.kv.host import memory
from penstock.kv.host.extent import NOTES, ExtentLayout
from penstock.kv.manager.manager import KvManager
from penstock.kv.pool.pool import BlockPool
from penstock.testing.loop import run_async
from penstock.transfer.storage.slots import RECORD
from tests.support.shared_host import BLOCK_BYTES, SLOTS, HostWorker, SharedHost
from tests.support.slots import NAMESPACE, chain

LAYOUT = ExtentLayout(SLOTS, BLOCK_BYTES)


def known(events, held=()):
    """Apply events to a set of hashes."""
    held = set(held)
    for event in events:
        hashes = unpack_hashes(event.block_hashes).tolist()
        assert event.tier is Tier.HOST
        if isinstance(event, BlockStored):
            held.update(hashes)
        elif isinstance(event, BlockRemoved):
            held.difference_update(hashes)
    return held


async def closed(*workers):
    for worker in workers:
        worker.tier.check()
        await worker.tier.close()


async def test_a_reader_that_missed_a_note_learns_it_from_the_record():
    host = SharedHost()
    one, two = host.worker(0), host.worker(1)
    await one.offload(chain(6))
    assert two.tier.locate(chain(6)) == 6
    host.clear_record(0, chain(6)[4:5])
    assert await two.load(chain(6)) == 4
    assert two.tier.locate(chain(6)) == 4, (
        "else the block would be looked for again and again, and kept nowhere"
    )
    assert known(two.tier.take_events()) == {int(low) for n, low in enumerate(chain(6)[:, 0]) if n != 4}
    await closed(one, two)


async def test_a_block_that_is_overwritten_while_another_worker_loads_it_is_only_missing():
    host = SharedHost()
    one, two = host.worker(0), host.worker(1)
    await one.offload(chain(8))
    assert two.tier.locate(chain(8)) == 8
    with two.loads_held():
        loading = two.begin_load(chain(8))
        for number in range(1, 5):
            await one.offload(chain(8, number))
    assert await loading == 0
    assert two.tier.num_corrupt == 0
    assert two.tier.locate(chain(8)) == 0
    assert await two.load(chain(8, 4)) == 8
    await closed(one, two)


async def test_blocks_of_another_namespace_are_neither_seen_nor_adopted():
    host = SharedHost()
    other = replace(NAMESPACE, model_digest="0ther")
    one, two = host.worker(0), host.worker(1, namespace=other)
    await one.offload(chain(6))
    assert two.tier.locate(chain(6)) == 0
    assert await two.offload(chain(6)) == 6
    assert await one.offload(chain(6)) == 0
    await one.tier.close()
    again = host.worker(0, namespace=other)
    assert again.tier.num_cached == 0
    assert again.tier.locate(chain(6)) == 6, "those of the other worker, which it may use now"
    await again.offload(chain(5, 1))
    assert two.tier.locate(chain(5, 1)) == 5
    await closed(again, two)


async def test_an_extent_of_another_size_is_begun_anew_and_the_others_hear_of_it():
    host = SharedHost()
    one, two = host.worker(0), host.worker(1)
    await one.offload(chain(6))
    held = known(two.tier.take_events(), ()) | (known(()) if two.tier.locate(chain(6)) else set())
    held = known(two.tier.take_events(), held)
    assert len(held) == 6
    await one.tier.close()
    again = host.worker(0, slots=SLOTS // 2)
    assert (again.tier.num_cached, two.tier.locate(chain(6))) == (0, 0)
    assert known(two.tier.take_events(), held) == set()
    await again.offload(chain(3, 1))
    assert await two.load(chain(3, 1)) == 3
    await closed(again, two)


async def test_another_process_on_the_same_extent_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "_LOCK_PAUSE_S", 0)
    host = SharedHost()
    one = host.worker(0)
    with pytest.raises(ConfigError, match=r"kv\.host: another process has the extent at byte 0 "):
        host.worker(0)
    await closed(one)
    await closed(host.worker(0))


def test_an_arena_that_is_gone_or_too_small_is_refused():
    host = SharedHost()
    with pytest.raises(ConfigError, match=r"kv\.host: 1,000 blocks of 4,096 bytes .* the host's arena has"):
        host.worker(0, slots=1_000)
    part = host.part(0)
    host.arena.close()
    with pytest.raises(ConfigError, match=r"kv\.host: .*(No such file|not sealed)"):
        HostWorker(part, SLOTS, BLOCK_BYTES)


async def test_a_block_that_another_worker_uses_is_not_the_next_to_be_evicted():
    host = SharedHost()
    one, two = host.worker(0), host.worker(1)
    await one.offload(chain(8))
    for number in range(1, 12):
        await one.offload(chain(6, number))
        if number % 2:
            assert await two.load(chain(8)) == 8
        else:
            assert await two.offload(chain(8)) == 0
    await closed(one, two)


async def test_a_worker_that_missed_notes_reads_all_records():
    rounds = NOTES // 60 + 1
    host = SharedHost()
    one, two = host.worker(0), host.worker(1)
    await one.offload(chain(6))
    assert two.tier.locate(chain(6)) == 6
    for number in range(rounds):
        await one.offload(chain(30, number + 1))
    assert two.tier.locate(chain(6)) == 0
    assert two.tier.locate(chain(30, rounds)) == 30
    assert known(two.tier.take_events()) == known(one.tier.take_events())
    await closed(one, two)


async def test_clearing_forgets_what_others_keep_but_not_what_they_store_afterwards():
    host = SharedHost()
    one, two = host.worker(0), host.worker(1)
    await one.offload(chain(6))
    await two.offload(chain(6, 1))
    two.tier.clear()
    assert [two.tier.locate(chain(6, number)) for number in (0, 1)] == [0, 0]
    assert [one.tier.locate(chain(6, number)) for number in (0, 1)] == [6, 0]
    await one.offload(chain(6, 2))
    assert two.tier.locate(chain(6, 2)) == 6
    await one.tier.close()
    again = host.worker(0)
    assert [two.tier.locate(chain(6, number)) for number in (0, 2)] == [0, 6]
    await closed(again, two)


@pytest.mark.slow
def test_no_damage_to_records_notes_or_header_serves_a_wrong_block():
    """Whatever a killed or mad process leaves: workers load right blocks or none, and raise nothing."""
    rng = random.Random(1)

    async def main():
        loaded = 0
        for _ in range(40):
            host = SharedHost()
            one, two = host.worker(0), host.worker(1)
            await one.offload(chain(8))
            await one.offload(chain(8, 1))
            two.tier.locate(chain(8))
            for _ in range(rng.randrange(1, 6)):
                damage(host.extent(0), rng)
            for number in range(3):
                loaded += await two.load(chain(8, number))
            one.kill()
            again = host.worker(0)
            for worker in (again, two):
                for number in range(3):
                    loaded += await worker.load(chain(8, number))
            damage(host.extent(0), rng)  # under a process that goes on
            await again.load(chain(8))
            await again.offload(chain(8, 2))
            assert await two.load(chain(8, 2)) == 8
            await closed(again, two)
        assert loaded > 250

    def damage(extent, rng):
        where = rng.choice(["header", "epoch", "count", "notes", "used", "record", "records", "data"])
        at = {
            "header": rng.randrange(48), "epoch": 1024 + rng.randrange(8), "count": 2048 + rng.randrange(8), "notes": 4096 + rng.randrange(400),
            "used": LAYOUT.used_offset + rng.randrange(8 * SLOTS),
            "record": LAYOUT.records_offset + rng.randrange(RECORD.itemsize * SLOTS),
            "records": LAYOUT.records_offset + RECORD.itemsize * rng.randrange(SLOTS),
            "data": LAYOUT.data_offset + rng.randrange(SLOTS * BLOCK_BYTES),
        }[where]  # fmt: skip
        if where == "records":  # one slot's record in the place of another's
            other = LAYOUT.records_offset + RECORD.itemsize * rng.randrange(SLOTS)
            extent[at : at + RECORD.itemsize] = np.array(extent[other : other + RECORD.itemsize])
        else:
            extent[at] ^= 1 << rng.randrange(8)

    run_async(main(), timeout_s=60)


async def test_events_name_the_host_where_workers_share_an_arena():
    host, alone = SharedHost(), SharedHost(workers=1).worker(0)
    one, two = host.worker(0), host.worker(1, namespace=replace(NAMESPACE, dtype="float16"))
    assert (one.tier.shared.kind, alone.tier.shared) == (Holder.HOST, None)
    assert one.tier.shared.id != two.tier.shared.id, "they cannot load each other's blocks"
    manager = KvManager(BlockPool(8, 4), [one.tier], lambda: None)
    assert manager.num_own == 0
    await one.offload(chain(3))
    assert {event.holder for event in manager.with_events(())} == {Holder.HOST}
    manager.clear()
    assert manager.with_events(()) == (AllBlocksCleared(holder=Holder.HOST),)
    assert manager.with_events(()) == ()
    await closed(one, two, alone)
