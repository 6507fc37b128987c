"""The requests that vLLM has: their ids, their limit, and the counts of each rank."""

import pytest

from penstock.core.errors import Overloaded, RequestError
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.vllm.request_table import RequestTable


def request(name: str) -> Request:
    return Request(
        request_id=name, model="m", token_ids=pack_tokens(range(100)), sampling=SamplingParams(max_tokens=20)
    )


def add(table: RequestTable, name: str, rank: int = 0) -> str:
    own = request(name)
    table.check(own)
    vllm_id = table.next_id(own)
    table.add(vllm_id, own, 0.0, rank)
    return vllm_id


def test_a_request_id_may_come_again_with_another_id_of_vllm() -> None:
    table = RequestTable(limit=4, ranks=1)
    first = add(table, "a")
    with pytest.raises(RequestError, match="'a' is under way already"):
        table.check(request("a"))
    assert table.remove(first).request.request_id == "a"
    again = add(table, "a")
    assert again != first
    assert table.vllm_id("a") == again
    assert table.get(first) is None, "outputs of the aborted first use are nobody's"


def test_more_requests_than_the_limit_are_refused() -> None:
    table = RequestTable(limit=2, ranks=1)
    first = add(table, "a")
    add(table, "b")
    with pytest.raises(Overloaded, match="2 requests are here, at most 2 may be"):
        table.check(request("c"))
    table.remove(first)
    table.check(request("c"))


def test_counts_of_a_rank_follow_its_requests() -> None:
    table = RequestTable(limit=9, ranks=2)
    ids = [add(table, name, rank=table.least_loaded()) for name in "abc"]
    assert [counts.requests for counts in table.counts] == [2, 1]
    assert table.load(1.0).waiting_requests == 3
    for vllm_id in ids:
        table.remove(vllm_id)
    assert [(counts.requests, counts.missing, counts.waiting) for counts in table.counts] == [(0, 0, {})] * 2
