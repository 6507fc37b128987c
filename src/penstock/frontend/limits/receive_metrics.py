"""Prometheus metrics of requests being received, by a frontend or the standalone router."""

import errno
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge


class ReceiveMetrics:
    """Receive metrics of one process. A registry can hold one per prefix."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        """Register metrics whose names begin with `prefix`."""
        self._received = Gauge(
            f"{prefix}_received_bytes",
            "Bytes of requests that have come and are not encoded yet (receive.bytes_max).",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._refused_bodies = Counter(
            f"{prefix}_refused_bodies",
            "Requests refused before they had come whole: too late, too large, or no room for more.",
            ["reason"],
            registry=registry,
        )
        self._accept_failures = Counter(
            f"{prefix}_accept_failures",
            "Times that no connection could be accepted, by the system's error; EMFILE is: out of descriptors.",
            ["error"],
            registry=registry,
        )

    def received(self, change_bytes: int) -> None:
        self._received.inc(change_bytes)

    def refused_body(self, reason: Literal["headers_late", "body_late", "size", "room"]) -> None:
        self._refused_bodies.labels(reason).inc()

    def accept_failed(self, error: OSError) -> None:
        self._accept_failures.labels(errno.errorcode.get(error.errno or 0, "unknown")).inc()
