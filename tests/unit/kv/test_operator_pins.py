"""What operators do to a cache."""

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.core.errors import RequestError
from penstock.core.types.events import Tier
from penstock.core.types.kv import KvEvict, KvFlush, KvList, KvPin, KvPinned, KvReport, KvUnpin
from penstock.core.wire import pack_hashes
from penstock.kv.operator_pins import KvActions, OperatorPins
from penstock.kv.pool import BlockPool, Pins
from penstock.kv.retention import RetentionConfig
from tests.support.manual_clock import ManualClock


class Stage:
    """A pool whose prompts are chains of numbers; equal leading numbers are equal blocks."""

    def __init__(self, num_blocks=16, **config):
        self.pool = BlockPool(num_blocks, 4)
        self.pins = Pins(self.pool, lambda: None)
        self.clock = ManualClock()
        self.told = self.cleared = 0
        self.kept = OperatorPins(self.pool, self.pins, RetentionConfig(**config), clock=self.clock)
        self.kept.on_change = self._note
        self.actions = KvActions(self.pool, self.kept, self.clear)

    def _note(self):
        self.told += 1

    @staticmethod
    def hashes(numbers):
        chained = [hash(tuple(numbers[: end + 1])) & (2**64 - 1) for end in range(len(numbers))]
        return np.array([(low, low ^ 5) for low in chained], dtype=np.uint64).reshape(-1, 2)

    def packed(self, numbers):
        return pack_hashes(self.hashes(numbers).ravel())

    def ask(self, numbers):
        """Compute a prompt's blocks, as a scheduler does; give how many were cached."""
        hashes = self.hashes(numbers)
        hits = self.pool.match(hashes)
        self.pool.acquire(hits)
        fresh = self.pool.allocate(len(hashes) - len(hits))
        assert fresh is not None
        self.pool.commit(fresh, hashes[len(hits) :], int(hashes[len(hits) - 1, 0]) if hits else None)
        self.pool.release([*hits, *fresh])
        self.check()
        return len(hits)

    def flood(self):
        self.ask(list(range(1000, 1000 + self.pool.num_available)))

    def clear(self):
        self.cleared += 1
        self.kept.clear()
        self.pool.reset()

    def act(self, action):
        report = self.actions.act(action)
        self.check()
        return report

    def pin(self, name, numbers, ttl_s=None):
        return self.act(KvPin(name=name, block_hashes=self.packed(numbers), ttl_s=ttl_s)).blocks

    def check(self):
        self.kept.check()
        self.pool.check()


def test_a_pin_keeps_what_is_resident_until_it_ends():
    stage = Stage(ttl_s=60)
    stage.ask([1, 2, 3])
    assert stage.pin("p", [1, 2, 3, 4]) == 3
    stage.flood()
    assert stage.ask([1, 2, 3]) == 3
    stage.clock.advance(20)
    assert stage.act(KvList()).pins == (KvPinned(name="p", blocks=3, expires_s=40.0),)
    assert stage.told == 0
    stage.clock.advance(40)
    assert stage.act(KvList()).pins == ()
    assert (stage.told, stage.kept.has_unreported) == (1, True)
    stage.flood()
    assert stage.ask([1, 2, 3]) == 0


def test_a_pin_of_the_same_name_takes_its_place():
    stage = Stage(ttl_s=60)
    stage.ask([1, 2])
    stage.ask([5])
    assert (stage.pin("p", [1, 2]), stage.pin("p", [5], ttl_s=300)) == (2, 1)
    stage.clock.advance(100)
    assert [(pin.name, pin.blocks) for pin in stage.act(KvList()).pins] == [("p", 1)]
    assert stage.act(KvUnpin(name="p")) == KvReport(blocks=1)
    with pytest.raises(RequestError, match="there is no pin 'p' here"):
        stage.act(KvUnpin(name="p"))


def test_pins_keep_a_share_of_the_blocks_and_a_shared_block_counts_once():
    stage = Stage(num_blocks=8, pinned_share=0.5)
    stage.ask([1, 2, 3])
    stage.ask([1, 2, 4, 5])
    assert (stage.pin("a", [1, 2, 3]), stage.pin("b", [1, 2, 4, 5])) == (3, 3)
    assert stage.kept.num_kept == 4
    assert stage.act(KvUnpin(name="a")) == KvReport(blocks=1), "the shared ones are the other's too"
    assert stage.act(KvEvict(block_hashes=stage.packed([1, 2, 4, 5]))) == KvReport(blocks=1)


def test_what_is_not_resident_is_no_pin():
    stage = Stage()
    assert stage.pin("p", [1, 2]) == 0
    assert len(stage.kept) == 0


def test_pins_end_one_by_one_for_a_request_that_fits_only_without_them():
    stage = Stage()
    stage.ask([1, 2])
    stage.ask([5, 6])
    stage.pin("old", [1, 2])
    stage.pin("new", [5, 6])
    assert stage.kept.give_way()
    assert [pin.name for pin in stage.kept] == ["new"]
    assert stage.kept.give_way()
    assert not stage.kept.give_way()
    stage.check()


def test_the_device_alone_is_flushed_block_by_block():
    stage = Stage(ttl_s=60)
    stage.ask([1, 2, 3])
    stage.ask([4, 5])
    stage.pin("p", [4, 5])
    running = stage.pool.match(stage.hashes([1]))
    stage.pool.acquire(running)
    stage.pool.take_events()
    assert stage.act(KvFlush(tier=Tier.DEVICE)) == KvReport(blocks=4)
    assert (stage.pool.num_cached, stage.cleared, len(stage.kept)) == (1, 0, 0)
    assert sum(len(event.block_hashes) // 8 for event in stage.pool.take_events()) == 4
    assert stage.act(KvFlush()) == KvReport(blocks=1)
    assert stage.cleared == 1
    with pytest.raises(RequestError, match="tier: must be device, or left out for all tiers, got disk"):
        stage.act(KvFlush(tier=Tier.DISK))


def test_a_check_refuses_what_a_pin_would_and_pins_nothing():
    stage = Stage()
    stage.ask([1, 2, 3])
    pin = KvPin(name="p", block_hashes=stage.packed([1, 2]), is_check=True)
    assert stage.act(pin) == KvReport()
    assert stage.act(KvList()).pins == ()
    with pytest.raises(RequestError, match=r"ttl_s: must be <= .*retention\.ttl_s_max"):
        stage.act(replace(pin, ttl_s=1e9))
    with pytest.raises(RequestError, match=r"retention\.pinned_share 0"):
        Stage(pinned_share=0.0).act(pin)
