"""Which workers can transfer KV to which others, by what workers say of themselves."""

import msgspec
import numpy as np
import pytest

from tests.support.cluster import small_card
from tests.support.kv_pairs import CARD, LAYOUT, at, costly, pairs, worker


def mask(*slots, of=4):
    return np.isin(np.arange(of), slots)


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (worker("p"), worker("d"), None),
        (worker("p", blocks=5), worker("d", blocks=50), None),
        (worker("p", tp=2), worker("d"), None),
        (worker("p", layout=None), worker("d", layout=None), None),
        (worker("p", layout=None), worker("d"), "keeps no memory"),
        (worker("p"), worker("d", None), "moves no KV"),
        (worker("p"), worker("d", card=small_card(block_size=8)), "blocks of 4 tokens there, of 8 here"),
        (worker("p"), worker("d", card=msgspec.structs.replace(CARD, salt=b"2")), "other weights"),
        (worker("p"), worker("d", card=msgspec.structs.replace(CARD, context_length=9)), None),
        (worker("p"), worker("d", at(transports=("nixl",))), "shm, tcp there, nixl here"),
        (worker("p"), worker("d", at(transports=())), "shm, tcp there, none here"),
        (worker("p"), worker("d", at(b"two")), r"listens on no tcp:// address"),
        (worker("p", at(b"two", listens=("tcp",))), worker("d"), None),
        (worker("p", at(b"two", listens=("tcp",), transports=("shm",))), worker("d"), "in common"),
        (worker("p", layout=msgspec.structs.replace(LAYOUT, num_kv_heads=4)), worker("d"), "num_kv_heads"),
    ],
)
def test_a_pair_fits_or_says_why_not(prefill, decode, why):
    found = pairs(prefill, decode)
    everybody = mask(0, 1, of=2)
    assert found.kinds(2).decode_workers(0)[1] == (why is None)
    assert (found.prefill_workers(everybody, mask(1, of=2)) & mask(0, of=2)).any() == (why is None)
    for slot in (0, 1):
        problem = found.problem(slot)
        assert (problem is None) == (why is None)
        assert why is None or msgspec.json.encode(problem)
    if why is not None:
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(found.problem(0))
    found.check()


def test_of_several_kinds_each_goes_its_own_way():
    other = msgspec.structs.replace(LAYOUT, dtype="bfloat16")
    found = pairs(worker("p0"), worker("p1", layout=other), worker("d0"), worker("d1", layout=other))
    decode_workers = mask(2, 3)
    assert (found.kinds(4).decode_workers(0) & decode_workers).tolist() == mask(2).tolist()
    assert (found.kinds(4).decode_workers(1) & decode_workers).tolist() == mask(3).tolist()
    assert found.prefill_workers(mask(0, 1), decode_workers).tolist() == mask(0, 1).tolist()
    assert found.prefill_workers(mask(0, 1), mask(2)).tolist() == mask(0).tolist()
    assert found.problem(0) is None
    found.remove(3)
    assert found.prefill_workers(mask(0, 1), mask(2)).tolist() == mask(0).tolist()
    assert "dtype" in found.problem(1)
    found.put(2, worker("d0", layout=other))
    assert found.prefill_workers(mask(0, 1), mask(2)).tolist() == mask(1).tolist()
    grown = mask(2, 5, of=8)
    found.put(5, worker("d2"))
    assert (found.kinds(8).decode_workers(0) & grown).tolist() == mask(5, of=8).tolist()
    found.check()


def test_who_is_alone_on_its_host_is_read_from_others_only():
    found = pairs(
        worker("p0", costly("shm", "tcp", host=b"a")), worker("d0", costly("shm", "tcp", host=b"b"))
    )
    found.put(2, worker("d1", costly("shm", host=b"a")))
    assert found.kinds(3).decode_workers(0)[1:].tolist() == [True, True]
    assert found.prefill_workers(mask(0, of=3), mask(2, of=3)).tolist() == mask(0, of=3).tolist()
    found.put(2, worker("d1", costly("shm", host=b"c")))
    assert found.kinds(3).decode_workers(0)[1:].tolist() == [True, False]
    assert not found.prefill_workers(mask(0, of=3), mask(2, of=3)).any()
    found.check()
