"""What frontends make of links that ask them, and of headers that anybody may send."""

import ssl

import pytest
from prometheus_client import CollectorRegistry

from penstock.frontend.config import FrontendConfig
from penstock.frontend.limits.certificate import RefusedHandshakes
from penstock.frontend.limits.headers import read_options
from penstock.frontend.limits.region_links import REGION_HEADER, RegionLinks
from penstock.frontend.tenants.tenants import ANONYMOUS, Tenant

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
