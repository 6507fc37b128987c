"""A prefix's loads: which source brings which block, and what happens when one does not."""

import numpy as np

from penstock.core.hashing import block_hashes
from penstock.kv.loads import PrefixLoad, find_runs
from tests.support.held_tier import HeldTier
from tests.support.manual_clock import ManualClock

SIZE = 4
HASHES = block_hashes(np.arange(10 * SIZE, dtype=np.int32), SIZE)


def keeping(*blocks, seconds_per_block=0.0):
    return HeldTier(HASHES[list(blocks), 0].tolist(), seconds_per_block)


def runs_of(sources, num_before=0):
    """(source, first block, number of blocks) of each run."""
    runs = find_runs(sources, HASHES, num_before)
    return [(sources.index(run.source), run.num_before, run.num_blocks) for run in runs]


class Loading:
    """A load of all that `sources` have, into targets 100 and on."""

    def __init__(self, *sources, late_s=None, is_worth=lambda *_: True):
        self.clock, self.ended, self.late, self.arrived = ManualClock(), [], [], []
        runs = find_runs(sources, HASHES, 0)
        self.load = PrefixLoad(
            runs,
            range(100, 100 + sum(run.num_blocks for run in runs)),
            sources,
            clock=self.clock,
            late_s=late_s,
            is_worth=is_worth,
            on_late=self.late.append,
            on_arrived=lambda load: self.arrived.append(load.arrived),
            done=lambda load: self.ended.append(load.arrived),
        )


def test_the_nearest_source_brings_what_it_has_and_the_next_one_goes_on():
    assert runs_of([keeping(0, 1, 5), keeping(0, 1, 2, 3, 4, 5)]) == [(0, 0, 2), (1, 2, 4)]
    assert runs_of([keeping(0), keeping(2)]) == [(0, 0, 1)], "block 1 is nowhere"
    assert runs_of([keeping(0), keeping(2)], num_before=2) == [(1, 2, 1)]
    assert runs_of([]) == []


def test_another_source_is_taken_where_it_is_known_to_be_quicker():
    slow, quick, unknown = keeping(*range(6), seconds_per_block=0.2), keeping(0, 1, 2), keeping(*range(6))
    assert runs_of([slow, unknown]) == [(0, 0, 6)]
    quick.seconds_per_block = 0.1
    assert runs_of([slow, unknown, quick]) == [(2, 0, 3), (0, 3, 3)]


def test_runs_after_a_missing_block_are_cancelled_and_waited_for():
    near, far = keeping(0, 1), keeping(2, 3)
    loading = Loading(near, far)
    near.loads[0].end(1)
    assert far.loads[0].is_cancelled
    assert loading.ended == [], "the other source may still write"
    far.loads[0].end()
    assert loading.ended == [1]


def test_a_source_that_is_not_worth_it_is_passed_over():
    near, far = keeping(0, 1, 2, 3), keeping(0, 1)
    runs = find_runs(
        [near, far], HASHES, 0, lambda source, _load_s, num_blocks, _: source is far or num_blocks < 3
    )
    assert [(run.source, run.num_before, run.num_blocks) for run in runs] == [(far, 0, 2), (near, 2, 2)]


def test_a_source_that_cannot_begin_brings_nothing_and_the_next_one_is_asked():
    near, far = keeping(0, 1), keeping(0, 1, 2)
    near.broken = OSError("no thread is left")
    loading = Loading(near, far)
    assert loading.ended == [], "never before the load is made"
    loading.clock.advance(0)
    assert far.loads[-1].targets == [100, 101]
    for load in far.loads:
        load.end()
    assert loading.ended == [3]


def in_chunks(*blocks, chunk_blocks=2, seconds_per_block=0.0):
    tier = keeping(*blocks, seconds_per_block=seconds_per_block)
    tier.chunk_blocks = chunk_blocks
    return tier


def targets_of(tier):
    return [load.targets for load in tier.loads]


def test_a_run_loads_by_chunks_in_order_two_at_a_time_and_each_is_told():
    tier = in_chunks(*range(7))
    loading = Loading(tier)
    assert targets_of(tier) == [[100, 101], [102, 103]]
    tier.loads[0].end()
    assert (loading.load.arrived, loading.arrived) == (2, [2])
    assert targets_of(tier)[2:] == [[104, 105]]
    tier.loads[2].end()
    assert loading.arrived == [2], "chunk 1 is missing before it"
    tier.loads[1].end()
    assert loading.arrived == [2, 6]
    assert targets_of(tier)[3:] == [[106]]
    tier.loads[3].end()
    assert (loading.ended, loading.arrived) == ([7], [2, 6]), "the end tells the last one"
    assert [(part.num_before, part.num_blocks) for part in loading.load.results()] == [(0, 7)]


def test_the_time_of_chunks_side_by_side_counts_once():
    tier = in_chunks(*range(6))
    loading = Loading(tier)
    for number, at_s in enumerate((0.2, 0.3, 0.5)):
        loading.clock.advance(at_s - loading.clock.time())
        tier.loads[number].end()
    (part,) = loading.load.results()
    assert (round(part.seconds, 9), round(part.waited_s, 9)) == (0.5, 0.5)


def test_a_late_or_cancelled_load_keeps_the_chunks_that_came():
    for late_s in (0.5, None):
        tier = in_chunks(*range(10))
        loading = Loading(tier, late_s=late_s)
        tier.loads[0].end()
        tier.loads[1].end()
        if late_s is None:
            loading.load.cancel()
        else:
            loading.clock.advance(0.6)
        assert [load.is_cancelled for load in tier.loads[2:]] == [True, True]
        assert [load.is_late for load in tier.loads[2:]] == [late_s is not None, False], "blamed once"
        assert loading.late == ([] if late_s is None else [tier])
        tier.loads[2].end(0)
        tier.loads[3].end(0)
        assert loading.ended == [4]
        assert len(tier.loads) == 4, "no more were begun"


def test_what_a_chunk_lacks_comes_from_the_next_source_and_the_run_goes_on():
    near, far = in_chunks(*range(6)), in_chunks(*range(6))
    loading = Loading(near, far)
    near.loads[0].end(1)
    assert targets_of(far) == [[101]]
    near.loads[1].end()
    far.loads[0].end()
    assert loading.load.arrived == 4
    assert targets_of(near)[2:] == [[104, 105]]
    near.loads[2].end()
    assert loading.ended == [6]


def test_a_run_ends_early_once_the_rest_is_computed_sooner():
    tier = in_chunks(*range(8), seconds_per_block=0.1)
    loading = Loading(tier, is_worth=lambda _source, load_s, num_blocks, _before: load_s < 0.2 * num_blocks)
    tier.loads[0].end()
    assert len(tier.loads) == 3, "20 ms a block are worth it"
    tier.seconds_per_block = 0.3
    tier.loads[1].end()
    tier.loads[2].end()
    assert (loading.ended, len(tier.loads)) == ([6], 3)
