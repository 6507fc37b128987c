"""The index of packs: what is held, and the events that tell it."""

import numpy as np

from penstock.core.types.events import BlockRemoved, BlockStored, Tier
from penstock.core.wire import unpack_hashes
from penstock.kv.object import index as index_module
from penstock.kv.object.index import PackIndex
from penstock.transfer.storage.packs import RECORD, Pack
from tests.support.slots import chain

HASHES = chain(8)


def pack(name, rows):
    records = np.zeros(len(rows), RECORD)
    records["hash"] = HASHES[rows]
    records["parent"] = [HASHES[row - 1, 0] if row else 0 for row in rows]
    records["data_sum"] = rows
    return Pack(name, records, 1000 + 10 * np.arange(len(rows)), 5000)


def told(index):
    """Give the events as (parent, blocks) for stored ones and (None, blocks) for removed ones, blocks by number."""
    number = {int(low): row for row, low in enumerate(HASHES[:, 0])}
    events = []
    for event in index.take_events():
        assert event.tier is Tier.OBJECT
        blocks = [number[int(low)] for low in unpack_hashes(event.block_hashes)]
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            events.append(("stored", None if parent is None else number[parent], blocks))
        else:
            assert isinstance(event, BlockRemoved)
            events.append(("removed", None, sorted(blocks)))
    index.check()
    return events


def test_a_block_in_two_packs_is_told_once_and_removed_with_the_last_one():
    index = PackIndex(16, 100)
    index.add(pack("a", [0, 1]), 1.0)
    told(index)
    index.add(pack("b", [1, 2]), 2.0)
    assert told(index) == [("stored", 1, [2])]
    index.remove(["a"])
    assert told(index) == [("removed", None, [0])]
    assert index.find(HASHES[1:])[0].name == "b"
    index.drop(HASHES[1].tobytes(), "b")
    assert told(index) == [("removed", None, [1])]


def test_beyond_its_bound_the_oldest_packs_are_forgotten():
    index = PackIndex(16, 4)
    index.add(pack("new", [0, 1]), 3.0)
    index.add(pack("old", [2, 3]), 1.0)
    told(index)
    index.add(pack("newer", [4, 5]), 2.0)
    assert index.names == {"new", "newer"}
    assert told(index) == [("removed", None, [2, 3]), ("stored", 3, [4, 5])]


def test_many_events_come_in_parts(monkeypatch):
    monkeypatch.setattr(index_module, "_EVENT_BLOCKS_MAX", 3)
    index = PackIndex(16, 100)
    index.add(pack("a", list(range(8))), 1.0)
    assert told(index) == [("stored", None, [0, 1, 2])]
    assert index.has_events
    assert told(index) + told(index) == [("stored", 2, [3, 4, 5]), ("stored", 5, [6, 7])]


def test_many_packs_past_the_bound_cost_the_same_each():
    """Counts comparisons of dates, not seconds: each pack past the bound looks at a few others."""
    looks = 0

    class Date(float):
        def __lt__(self, other):
            nonlocal looks
            looks += 1
            return float(self) < float(other)

    def looks_of(count):
        nonlocal looks
        index = PackIndex(16, 1_000)
        hashes = chain(2 * count)
        for number in range(count):
            records = np.zeros(1, RECORD)
            records["hash"] = hashes[number]
            index.add(Pack(str(number), records, np.zeros(1, np.int64), 100), Date(number))
            if number == count // 2:
                looks = 0
        index.check()
        assert len(index) == 1_000
        return looks / (count // 2)

    assert looks_of(4_000) < 40


def test_the_oldest_go_first_after_packs_came_went_and_were_replaced():
    rng = np.random.default_rng(3)
    index = PackIndex(16, 4)
    known = {}
    for number in range(600):
        name, date_s = f"p{rng.integers(12)}", float(rng.integers(1000))
        if rng.random() < 0.3:
            index.remove([name])
            known.pop(name, None)
        else:
            index.add(pack(name, [int(rng.integers(8))]), date_s)
            known[name] = date_s
            while set(known) != index.names:
                oldest = min(known, key=known.get)
                assert oldest not in index.names, number
                del known[oldest]
        index.check()
        assert len(index._by_date) < 100
