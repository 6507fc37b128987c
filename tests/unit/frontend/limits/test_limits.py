"""What requests may take and say: places and time, keys, traces, and what links of regions ask."""

import asyncio
import contextlib
import ssl
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import DeadlineExceeded, Overloaded, RequestError, Unavailable
from penstock.core.types.requests import TraceContext
from penstock.frontend.config import FrontendConfig
from penstock.frontend.errors import AdminTokenError, ApiKeyError, ReceiveTimeoutError
from penstock.frontend.limits.admission import RequestAdmission, RequestSlot
from penstock.frontend.limits.headers import read_options, read_trace, sound_request_id
from penstock.frontend.limits.keys import TenantConfig, hash_of
from penstock.frontend.limits.regions import REGION_HEADER, PrefixQuery, RegionLinks
from penstock.frontend.limits.tenants import ANONYMOUS, ApiAccess, Tenant, TenantKeys
from penstock.frontend.metrics import RefusedHandshakes

pytestmark = pytest.mark.virtual


def admission_of(inflight_max: int, *, receive_timeout_s: float = 60) -> RequestAdmission:
    return RequestAdmission(
        inflight_max=inflight_max,
        request_timeout_s=600,
        receive_timeout_s=receive_timeout_s,
        retry_after_s=lambda: 40.0,
    )


@contextlib.contextmanager
def admitted(admission: RequestAdmission) -> Iterator[RequestSlot]:
    with admission.arrive() as slot:
        admission.admit(slot)
        yield slot


async def test_more_than_allowed_is_refused_until_one_leaves() -> None:
    admission = admission_of(1)
    with admitted(admission):
        with pytest.raises(Overloaded, match="1 requests are under way") as caught, admitted(admission):
            pass
        assert (caught.value.http_status, caught.value.retry_after_s) == (503, 40.0)
    with admitted(admission):
        assert admission.inflight == 1
    assert admission.inflight == 0


async def test_those_that_arrive_take_no_place_and_have_less_time() -> None:
    admission = admission_of(1)
    with admission.arrive() as slow, admitted(admission) as fast:
        assert admission.inflight == 1
        assert fast.deadline == slow.deadline + 540
        with pytest.raises(ReceiveTimeoutError, match=r"60 s after the headers"), slow.limit():
            await asyncio.sleep(3600)
        with pytest.raises(Overloaded):
            admission.admit(slow)
    assert admission.inflight == 0


async def test_the_deadline_moves_both_ways_while_the_request_runs() -> None:
    loop = asyncio.get_running_loop()
    admission = admission_of(1)

    async def request() -> None:
        with admission.arrive() as slot, slot.limit():
            admission.admit(slot)
            await asyncio.sleep(70)  # past the time for the body, which is there
            slot.move_deadline(loop.time() + 5)
            await asyncio.sleep(3600)

    with pytest.raises(DeadlineExceeded):
        await request()
    assert loop.time() == pytest.approx(75)


@pytest.mark.parametrize("ends", ["in time", "late", "hurried"])
async def test_draining_waits_and_ends_what_takes_too_long(ends: str) -> None:
    admission = admission_of(2)
    admission.hurry()  # nothing drains: nothing happens
    errors: list[str] = []
    drained = asyncio.Event()

    async def request(*, limited: bool) -> None:
        with admitted(admission) as slot:
            if not limited:
                await drained.wait()  # between two limits when the end comes
            try:
                with slot.limit():
                    await asyncio.sleep(3600 if ends == "hurried" else 20)
            except Unavailable as error:
                errors.append(str(error))

    async with asyncio.TaskGroup() as group:
        group.create_task(request(limited=True))
        if ends != "in time":
            group.create_task(request(limited=False))
        await asyncio.sleep(0)
        draining = group.create_task(admission.drain({"in time": 60, "late": 10, "hurried": 7200}[ends]))
        await asyncio.sleep(0)
        if ends == "hurried":
            admission.hurry()
            admission.hurry()
        assert await draining == (0 if ends == "in time" else 2)
        drained.set()
    assert errors == ([] if ends == "in time" else ["the server is shutting down; try again"] * 2)
    assert admission.inflight == 0


def test_without_a_token_admin_is_closed_and_without_keys_the_api_is_open() -> None:
    access = ApiAccess()
    assert access.tenant_of({}) is ANONYMOUS
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
        with pytest.raises(AdminTokenError):
            access.check_admin(headers)


def test_bearer_is_read_as_clients_write_it() -> None:
    access = ApiAccess(tenants=TenantKeys({"one": TenantConfig(keys=(hash_of("key"),))}), admin_token="token")
    for headers in (
        {"Authorization": "Bearer key"},
        {"Authorization": "bearer key"},
        {"Authorization": "BEARER  key "},
        {"X-API-Key": " key"},
    ):
        assert access.tenant_of(headers).name == "one"
    wrong = ("key", "Basic key", "Bearer key2", "Bearer ke", "Bearer", "Bearer k\udcffy", "Bearer token", "")
    for value in (*wrong, f"Bearer {hash_of('key')}"):
        with pytest.raises(ApiKeyError) as refused:
            access.tenant_of({"Authorization": value})
        assert refused.value.http_status == 401
    access.check_admin({"Authorization": "Bearer token"})
    for value in (*wrong[:-2], "Bearer key", ""):
        with pytest.raises(AdminTokenError):
            access.check_admin({"Authorization": value})


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


FROM_EU = {REGION_HEADER: "eu"}


def test_another_secret_is_noted_until_the_roots_agree():
    registry = CollectorRegistry()
    links = RegionLinks(registry)

    def noted(region="eu"):
        labels = {"region": region, "problem": "secret"}
        return registry.get_sample_value("penstock_frontend_link_problems_total", labels)

    links.asked_prefixes(FROM_EU, b"a" * 16, b"b" * 16)
    links.asked_prefixes(FROM_EU, b"a" * 16, b"a" * 16)
    links.asked_prefixes(FROM_EU, b"", b"a" * 16)
    links.asked_prefixes({}, b"a" * 16, b"b" * 16)
    assert noted() == 1


@pytest.mark.parametrize(
    ("reason", "counted"),
    [
        ("TLSV1_ALERT_UNKNOWN_CA", "certificate"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "certificate"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "certificate"),
        ("HTTP_REQUEST", "other"),
        (None, "other"),
    ],
)
async def test_refused_handshakes_are_counted_by_reason(reason, counted):
    registry = CollectorRegistry()
    error = ssl.SSLError(1, "failed") if reason else ConnectionResetError()
    if reason:
        error.reason = reason
    RefusedHandshakes(registry).note("10.0.0.1:1234", error)
    assert registry.get_sample_value("penstock_frontend_tls_refused_total", {"reason": counted}) == 1


def test_requests_of_a_links_key_go_to_no_other_region_whatever_their_headers_say():
    def forwarded(tenant, **headers):
        return read_options(headers, FrontendConfig(), tenant).is_forwarded

    marked = {"X-Penstock-Forwarded": "1"}
    assert forwarded(Tenant(name="eu", is_link=True))
    assert forwarded(Tenant(name="eu", is_link=True), **{"X-Penstock-Forwarded": "0"})
    assert forwarded(ANONYMOUS, **marked), "who says so gets what it asks for"
    for value in ("", "0", "2", "1, 1", "true"):
        assert not forwarded(ANONYMOUS, **{"X-Penstock-Forwarded": value})


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_trace_is_passed_on_as_it_came() -> None:
    headers = {"traceparent": PARENT, "tracestate": "a=1,b=2", "X-Request-Id": "r 1"}
    trace = read_trace(headers)
    assert trace == TraceContext(request_id="r 1", traceparent=PARENT, tracestate="a=1,b=2")
    assert trace.headers() == headers
    assert trace.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert read_trace({}) is None
    only = read_trace({"X-Request-Id": "r"})
    assert only == TraceContext(request_id="r")
    assert only.headers() == {"X-Request-Id": "r"}
    assert only.trace_id == ""
    later = f"01{PARENT[2:]}-more"
    assert read_trace({"traceparent": later}) == TraceContext(traceparent=later), "of a version to come"


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}-more",
        f"ff{PARENT[2:]}",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        f"01{PARENT[2:]}-{'x' * 600}",
        f"01{PARENT[2:]}-\x01",
        PARENT.replace("-", "_"),
    ],
)
def test_what_is_malformed_is_left_out(parent: str) -> None:
    assert read_trace({"traceparent": parent, "tracestate": "a=1"}) is None
    assert read_trace({"traceparent": parent, "X-Request-Id": "r"}) == TraceContext(request_id="r")


def test_ids_and_states_that_could_break_a_line_are_left_out() -> None:
    for wrong in ("", "a\nb", "é", "x" * 129, "\x00"):
        assert sound_request_id({"X-Request-Id": wrong}) == ""
    for wrong in ("x" * 513, "a=é", "a\tb"):
        assert read_trace({"traceparent": PARENT, "tracestate": wrong}) == TraceContext(traceparent=PARENT)
