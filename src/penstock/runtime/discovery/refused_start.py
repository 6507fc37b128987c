"""A note in the registry about a refused start, so that the deployment that already runs there logs it.

The note is not authenticated, since its process has another secret or release. So readers log only its host name and reason.
"""

import secrets
import socket
from collections import OrderedDict

import msgspec

from penstock.core.log import get_logger
from penstock.core.wire import WIRE_VERSION, Wire
from penstock.runtime.discovery.metrics import RegistryMetrics

KEPT_LEASES = 3
"""Lease times after which a note expires."""
_HOST_CHARACTERS_MAX = 64
_KNOWN_MAX = 1024
_SEPARATE = (
    "give each deployment a runtime.namespace of its own, and all hosts of one the same secret and graph name"
)
_FIXES = {
    "secret": _SEPARATE,
    "hash_key": _SEPARATE,
    "version": "update the older side: releases whose wire versions differ by one work together",
    "damaged": "something else writes into this namespace of the registry; give it a place of its own",
}
_encoder = msgspec.msgpack.Encoder()
_log = get_logger()


class RefusedStart(Wire, frozen=True, tag="refused_start"):
    """A process that gave up its start. All releases read this, so the fields never change.

    Attributes:
        host: of the process.
        reason: what differs from the registrations found: `secret`, `hash_key`, `version` or `damaged`.
        wire_version: of the process.
    """

    host: str
    reason: str
    wire_version: int


_decoder: msgspec.msgpack.Decoder[RefusedStart] = msgspec.msgpack.Decoder(RefusedStart)


def refused_start(reason: str) -> bytes:
    """Encode this process's note."""
    host = socket.gethostname()[:_HOST_CHARACTERS_MAX]
    return _encoder.encode(RefusedStart(host=host, reason=reason, wire_version=WIRE_VERSION))


def start_key() -> str:
    """Make a random key for a note."""
    return secrets.token_hex(8)


class RefusedStarts:
    """Logs and counts each refused start once. One event loop owns it."""

    def __init__(self, metrics: RegistryMetrics) -> None:
        """Begin without notes."""
        self._metrics = metrics
        self._known: OrderedDict[str, None] = OrderedDict()

    def note(self, key: str, data: bytes) -> None:
        """Log and count a note, unless that was done. Malformed notes are ignored."""
        if key in self._known:
            return
        self._known[key] = None
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        try:
            start = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        reason = start.reason if start.reason in _FIXES else "other"
        self._metrics.refused_starts.labels(reason).inc()
        _log.warning(
            "start_refused",
            host=start.host[:_HOST_CHARACTERS_MAX],
            reason=reason,
            wire_version=start.wire_version,
            own_wire_version=WIRE_VERSION,
            error="a process of another deployment or release found this one's workers, and gave up its start",
            fix=_FIXES.get(reason, _SEPARATE),
        )
