"""An instance as registries of other makers keep it: its bytes, and a proof that its process knows the deployment's secret."""

import msgspec

from penstock.core.errors import PenstockError, ProtocolError
from penstock.core.net.handshake import check_proof, check_version, prove
from penstock.core.types.instances import Instance
from penstock.core.wire import WIRE_VERSION, Wire
from penstock.runtime.handshake import Identity

_PURPOSE = b"penstock registration"
_encoder = msgspec.msgpack.Encoder()


class Record(Wire, frozen=True, tag="registration"):
    """A registration.

    Attributes:
        instance: an encoded `Instance`, read only where the proof fits.
        proof: HMAC of `instance` by the deployment's secret.
    """

    wire_version: int
    key_fingerprint: str
    instance: bytes
    proof: bytes


class RecordError(ProtocolError):
    """A registration that this process cannot use; `reason` is `damaged`, `version`, `secret` or `hash_key`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Records:
    """Encodes and reads the registrations of one deployment."""

    def __init__(self, identity: Identity) -> None:
        """Use the deployment's secret and hash key."""
        self._identity = identity

    def encode(self, instance: Instance) -> bytes:
        data = _encoder.encode(instance)
        return _encoder.encode(
            Record(
                wire_version=WIRE_VERSION,
                key_fingerprint=self._identity.key_fingerprint,
                instance=data,
                proof=prove(self._identity.secret, _PURPOSE, data),
            )
        )

    def decode(self, data: bytes) -> Instance:
        """Read a registration.

        Raises:
            RecordError: it is damaged, or of another deployment or release.
        """
        try:
            record = _records.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(
                "damaged", f"{len(data)} bytes that are no registration: {error}; something else writes there"
            ) from error
        reason = "version"
        try:
            check_version(record.wire_version, WIRE_VERSION, "wire version: the worker speaks")
            reason = "secret"
            check_proof(
                record.proof,
                prove(self._identity.secret, _PURPOSE, record.instance),
                "it is registered with another secret: two deployments share one runtime.namespace, or their secrets differ;"
                " give each deployment a namespace of its own, and all its hosts one secret",
            )
            reason = "hash_key"
            if record.key_fingerprint != self._identity.key_fingerprint:
                raise ProtocolError(
                    f"its hash key has the fingerprint {record.key_fingerprint}, ours {self._identity.key_fingerprint};"
                    " give both hosts a graph of the same name"
                )
            reason = "damaged"
            return _instances.decode(record.instance)
        except PenstockError as error:
            raise RecordError(reason, error.message) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(reason, f"its registration cannot be read: {error}") from error


_records: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_instances: msgspec.msgpack.Decoder[Instance] = msgspec.msgpack.Decoder(Instance)
