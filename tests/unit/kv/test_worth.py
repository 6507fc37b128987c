"""Load or compute: a run is loaded only as far as that is predicted to be sooner, and waited for as long as it is worth it."""

import pytest

from penstock.kv.load_or_compute import late_after_s, worth_loading

BLOCK = 10
FAST, SLOW = "fast", "slow"


def worth(runs, *, block_s, token_s=0.01, deeper_s=0.0, known=100, cached=0):
    """Count runs; `block_s` maps a source to its seconds for a block, `deeper_s` is what a token costs more for each before it."""
    return worth_loading(
        [(source, blocks, blocks * BLOCK) for source, blocks in runs],
        lambda source, blocks: blocks * block_s[source],
        lambda new, before: new * (token_s + deeper_s * before),
        known_tokens=known,
        cached_tokens=cached,
    )


@pytest.mark.parametrize(("block_s", "count"), [(0.099, 1), (0.1, 0), (0.101, 0), (0.0, 1)])
def test_a_run_is_loaded_while_that_is_sooner_than_computing_it(block_s, count):
    assert worth([(FAST, 5)], block_s={FAST: block_s}) == count


def test_runs_after_the_cut_are_computed():
    times = {FAST: 0.01, SLOW: 0.15}
    assert worth([(FAST, 4), (SLOW, 4)], block_s=times) == 1
    assert worth([(SLOW, 4), (FAST, 4)], block_s=times) == 2, "the slow one is worth the fast one behind it"
    assert worth([(SLOW, 6), (FAST, 1)], block_s=times) == 0


def test_sources_load_at_the_same_time_and_the_runs_of_one_after_each_other():
    both = {FAST: 0.06, SLOW: 0.06}
    assert worth([(FAST, 2), (SLOW, 2), (FAST, 2)], block_s=both) == 3
    assert worth([(FAST, 2), (SLOW, 2)], block_s=both | {SLOW: 0.15}) == 2, "0.3 s in all, and 0.4 to compute"
    assert worth([(SLOW, 2), (SLOW, 2)], block_s={SLOW: 0.15}) == 0, "0.6 s in all"


def test_deep_tokens_cost_more_so_the_same_run_is_worth_more_behind_a_long_prefix():
    times = {SLOW: 0.15}
    shallow = worth([(SLOW, 5)], block_s=times, deeper_s=0.0001, known=60)
    deep = worth([(SLOW, 5)], block_s=times, deeper_s=0.0001, known=260, cached=200)
    assert (shallow, deep) == (0, 1)


def test_all_is_loaded_before_a_prompt_was_ever_computed():
    count = worth_loading(
        [(SLOW, 5, 50), (FAST, 5, 50)],
        lambda _source, blocks: 100.0 * blocks,
        lambda _new, _before: None,
        known_tokens=100,
        cached_tokens=0,
    )
    assert count == 2
    assert worth([], block_s={}) == 0


def test_a_load_is_late_after_four_times_its_prediction_and_a_quarter_of_a_second():
    assert late_after_s(0.0) == 0.25
    assert late_after_s(2.0) == 8.25
