"""What a link may ask of prefixes."""

import pytest

from penstock.core.errors import RequestError
from penstock.frontend.limits.prefix_query import PrefixQuery


def test_a_query_is_read() -> None:
    asked = PrefixQuery.read({"model": "m", "after": "7-3,9-0", "interval_s": "0.5"})
    assert (asked.model, asked.after, asked.interval_s) == ("m", {7: 3, 9: 0}, 0.5)
    assert PrefixQuery.read({"model": "m"}).after == {}
    assert PrefixQuery.read({"model": "m", "root": "0aff"}).root == b"\x0a\xff"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({}, "model"),
        ({"model": ""}, "model"),
        ({"model": "m", "interval_s": "x"}, "interval_s"),
        ({"model": "m", "interval_s": "nan"}, "interval_s"),
        ({"model": "m", "interval_s": "inf"}, "interval_s"),
        ({"model": "m", "interval_s": "-1"}, "interval_s"),
        ({"model": "m", "after": "1"}, "after"),
        ({"model": "m", "after": "1-x"}, "after"),
        ({"model": "m", "after": "-1-2"}, "after"),
        ({"model": "m", "after": "1-" + "9" * 20}, "after"),
        ({"model": "m", "after": "\u0661-1"}, "after"),
        ({"model": "m", "root": "xy"}, "root"),
        ({"model": "m", "root": "a"}, "root"),
        ({"model": "m", "root": "a" * 34}, "root"),
        ({"model": "m", "after": ",".join(f"{n}-1" for n in range(65))}, "after"),
    ],
)
def test_other_queries_are_refused_by_the_field(query: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        PrefixQuery.read(query)
    assert refused.value.param == param
    assert param in refused.value.message
