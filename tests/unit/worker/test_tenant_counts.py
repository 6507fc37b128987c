"""What a worker counts of tenants: what one frontend uses, the others hear once; tables keep their bounds."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ProtocolError
from penstock.core.types.load import TENANTS_MAX, PeerCount, TenantCount
from penstock.core.wire import encode
from penstock.runtime.requests.outbox import CODEC, CountTenants
from penstock.seams import FrontendSink
from penstock.worker.frontends import LATELY_S, TenantCounter

A, B, C = (cast("FrontendSink", name) for name in "abc")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.slow
def test_a_million_names_of_one_frontend_are_bounded() -> None:
    counter = TenantCounter(Clock())
    counter.count({"mine": TenantCount(requests=1, inflight=1)}, A)
    for start in range(0, 1_000_000, TENANTS_MAX):
        names = (str(number) for number in range(start, start + TENANTS_MAX))
        counter.count({name: TenantCount(requests=1, inflight=1) for name in names}, B)
        counter.check()
    assert len(counter.count({}, A)) <= TENANTS_MAX
    assert counter.count({}, B)["mine"].frontends == 1, "others' tenants are still counted"


@pytest.mark.parametrize(
    "counts",
    [
        {str(number): TenantCount() for number in range(TENANTS_MAX + 1)},
        {"x" * 257: TenantCount()},
        {"t": TenantCount(requests=1 << 60)},
        {"t": TenantCount(inflight=-1)},
        {"t": TenantCount(tokens=-(1 << 60))},
    ],
    ids=["names", "name", "requests", "inflight", "tokens"],
)
def test_counts_that_no_frontend_has_end_its_connection(counts: dict[str, TenantCount]) -> None:
    with pytest.raises(ProtocolError, match="count_tenants"):
        CODEC.decode(encode(CountTenants(call_id=1, counts=tuple(counts.items()))))


names = st.sampled_from("tu")
steps = st.lists(
    st.tuples(
        st.sampled_from([A, B, C]),
        st.booleans() | st.floats(0.0, 1.0),
        st.dictionaries(
            names,
            st.builds(
                TenantCount,
                requests=st.integers(0, 9),
                tokens=st.integers(-99, 99),
                inflight=st.integers(0, 9),
            ),
        ),
    ),
    max_size=30,
)


@given(steps)
def test_each_frontend_hears_of_each_use_exactly_once(
    history: list[tuple[FrontendSink, float, dict[str, TenantCount]]],
) -> None:
    """Against a log of all counts; a True instead of a time ends the frontend's connection."""
    clock = Clock()
    counter = TenantCounter(clock)
    log: list[tuple[FrontendSink, str, TenantCount]] = []
    read: dict[FrontendSink, int] = {}  # how far in the log each connected frontend is
    present: dict[FrontendSink, dict[str, TenantCount]] = {}
    counted_s: dict[FrontendSink, float] = {}
    for sink, then, counts in history:
        if then is True:
            counter.forget(sink)
            for table in (read, present, counted_s):
                table.pop(sink, None)
            continue
        clock.now_s += then
        for silent in [each for each, at_s in counted_s.items() if clock.now_s - at_s >= LATELY_S]:
            for table in (read, present, counted_s):
                table.pop(silent)
        heard = counter.count(counts, sink)
        missed = [entry for entry in log[read.get(sink, len(log)) :] if entry[0] is not sink]
        log += [(sink, name, count) for name, count in counts.items()]
        read[sink], present[sink], counted_s[sink] = len(log), counts, clock.now_s
        for name in "tu":
            peers = heard.get(name, PeerCount())
            mine = [count for _, of, count in missed if of == name]
            assert (peers.requests, peers.tokens) == (
                sum(count.requests for count in mine),
                sum(count.tokens for count in mine),
            )
            assert peers.inflight == sum(
                of[name].inflight for each, of in present.items() if each is not sink and name in of
            )
        counter.check()
