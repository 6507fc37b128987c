"""A start that was given up is said once, whatever its bytes claim; all releases read the same bytes."""

import msgspec
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.runtime.discovery.registrations import (
    RefusedStart,
    RefusedStarts,
    RegistryMetrics,
    refused_start,
)


def noted(*starts):
    registry = CollectorRegistry()
    starts_seen = RefusedStarts(RegistryMetrics(registry))
    with capture_logs() as logs:
        for key, data in starts:
            starts_seen.note(key, data)
    name = "penstock_runtime_refused_starts_total"
    counts = {
        reason: registry.get_sample_value(name, {"reason": reason})
        for reason in ("secret", "hash_key", "version", "damaged", "other")
    }
    return logs, {reason: count for reason, count in counts.items() if count}


def test_each_is_said_once():
    logs, counts = noted(
        ("a", refused_start("secret")), ("a", refused_start("secret")), ("b", refused_start("version"))
    )
    assert [line["reason"] for line in logs] == ["secret", "version"]
    assert counts == {"secret": 1, "version": 1}
    assert "update the older side" in logs[1]["fix"]


def test_what_others_wrote_makes_no_long_line_and_no_series_of_its_own():
    forged = msgspec.msgpack.encode(RefusedStart(host="h" * 10_000, reason="r" * 10_000, wire_version=1))
    logs, counts = noted(
        ("a", forged), ("b", b""), ("c", b"\xc1"), ("d", msgspec.msgpack.encode({"type": "other"}))
    )
    assert counts == {"other": 1}
    assert [len(line["host"]) for line in logs] == [64]


def test_the_bytes_are_those_of_every_release():
    data = msgspec.msgpack.encode(RefusedStart(host="a", reason="secret", wire_version=3))
    assert (
        data.hex()
        == "84a474797065ad726566757365645f7374617274a4686f7374a161a6726561736f6ea6736563726574ac776972655f76657273696f6e03"
    )
