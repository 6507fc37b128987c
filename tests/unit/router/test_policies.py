"""Each policy's choice, ties, and what a decision among 1,000 workers costs."""

from collections import Counter

import numpy as np

from penstock.core.errors import PenstockError
from penstock.core.hashing import block_hashes
from penstock.router.config import RouterConfig
from penstock.router.policies import choose, make_policy, tie_of
from penstock.testing.routing_policy import make_context
from tests.support.scene import make_request, run_scenario


def chosen(policy: str, request_hash: int = 1, **columns: object) -> int | None:
    made = make_context(**columns)
    return choose(make_policy(policy).costs(made), made.eligible, request_hash)


def test_kv_avoids_a_worker_without_room():
    assert chosen("kv", overlap_blocks=[0, 2, 0], total_blocks=[50, 50, 50], active_blocks=[0, 48, 44]) == 0
    # not having said how many blocks there are is not being full
    assert chosen("kv", overlap_blocks=[0, 2, 0], total_blocks=[0, 0, 0]) == 1


def test_least_loaded_counts_requests_and_then_blocks():
    assert chosen("least-loaded", running_requests=[2, 1, 1], waiting_requests=[0, 1, 0]) == 2
    assert chosen("least-loaded", running_requests=[1, 1, 1], active_blocks=[30, 20, 25]) == 1


def test_what_begins_alike_is_spread_where_prices_are_equal_and_what_is_equal_meets():
    """A chat template makes first blocks equal, and more of them than a short question has."""
    template, rng = np.arange(64, dtype=np.int32), np.random.default_rng(0)
    chosen = []
    for _ in range(400):
        tokens = np.concatenate((template, rng.integers(0, 1000, int(rng.integers(1, 40)), dtype=np.int32)))
        hashes = block_hashes(tokens, 16)[:, 0]
        tie = tie_of(hashes, tokens.tobytes(), 16)
        assert tie == tie_of(hashes.copy(), tokens.tobytes(), 16)
        chosen.append(choose(np.zeros(4), np.ones(4, dtype=np.bool_), tie))
    assert min(np.bincount(chosen, minlength=4)) > 60


def test_cold_requests_one_after_the_other_do_not_pile_up_on_one_worker():
    async def scene(_, dispatcher, _engines):
        template = tuple(range(40))
        for number in range(24):
            tokens = (*template, 100 + number)
            async with dispatcher.open(make_request(f"r{number}", tokens)) as stream:
                sent[dispatcher.latest_decisions(1)[-1].worker] += 1
                stream.fail(PenstockError("enough"))

    sent = Counter()
    run_scenario(scene, num_workers=3, config=RouterConfig(policy="least-loaded"))
    assert min(sent[f"w{number}"] for number in (1, 2, 3)) >= 3
