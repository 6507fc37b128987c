"""The metadata of an agent, exchanged out of band: identity, addresses, and the regions that a peer is given."""

import hashlib
from pathlib import Path

import msgspec

from penstock.core import framing
from penstock.core.descriptors import RegionInfo
from penstock.core.errors import ProtocolError
from penstock.core.wire import Wire, encode

TRANSFER_VERSION = 1
"""Raised when an older agent could misread metadata or frames; neighbours understand each other."""
_MAGIC = b"PTA\n"
_BYTES_MAX = 64 << 20


class AgentMetadata(Wire, frozen=True):
    """An agent as its peers see it.

    `token` is random and proves that a peer was given this; `host` names the machine and its namespaces; `contacts` is what
    each transport adds; `certificate` is the fingerprint of the agent's TLS certificate.
    """

    version: int
    name: str
    token: bytes
    host: bytes
    addresses: tuple[str, ...] = ()
    contacts: dict[str, bytes] = msgspec.field(default_factory=dict)
    regions: tuple[RegionInfo, ...] = ()
    certificate: bytes = b""


_decoder = msgspec.msgpack.Decoder(AgentMetadata)


def encode_metadata(metadata: AgentMetadata) -> bytes:
    return _MAGIC + encode(metadata)


def decode_metadata(data: bytes) -> AgentMetadata:
    """Decode the result of `TransferAgent.metadata`.

    Raises:
        ProtocolError: it is no metadata, or of an unsupported version.
        TypeError: it is not bytes.
    """
    if not isinstance(data, bytes | bytearray):
        raise TypeError(
            f"agent metadata: {type(data).__name__}; expected the bytes that `metadata()` of the peer gave"
        )
    if not data.startswith(_MAGIC) or len(data) > _BYTES_MAX:
        raise ProtocolError(
            f"agent metadata: {len(data)} bytes that begin with {bytes(data[:4])!r}; expected what"
            " TransferAgent.metadata() of the peer returned, unchanged"
        )
    try:
        metadata = _decoder.decode(data[len(_MAGIC) :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"agent metadata of {len(data)} bytes cannot be read: {error}") from error
    check_version(metadata.version, f"agent {metadata.name}")
    return metadata


def check_version(theirs: int, who: str) -> None:
    """Check a peer's version.

    Raises:
        ProtocolError: it is too far from ours.
    """
    framing.check_version(theirs, TRANSFER_VERSION, f"{who}: transfer version")


def host_fingerprint() -> bytes:
    """Name what processes must have in common to share memory: the boot, and the namespaces of network, pids and IPC."""
    digest = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    for namespace in ("net", "pid", "ipc"):
        digest.update(str(Path(f"/proc/self/ns/{namespace}").readlink()).encode())
    return digest.digest()[:8]
