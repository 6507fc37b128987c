"""What one process registers in etcd, NATS or Kubernetes, and which of its registrations are not there yet."""

import asyncio
from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.core.errors import PenstockError, ProtocolError, Unavailable
from penstock.core.framing import check_proof, check_version, prove
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance
from penstock.core.wire import WIRE_VERSION, Wire
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.handshake import Identity

_log = get_logger()


class RegistryMetrics:
    """Whether the registry answers, and what of it this process cannot use."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """Register them; None for nowhere."""
        registry = registry or CollectorRegistry()
        self.connected = Gauge(
            "penstock_runtime_registry_connected",
            "1 while the registry of workers answers, else 0: what is known is used on.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.losses = Counter(
            "penstock_runtime_registry_losses",
            "Times that a registry which had answered no longer did.",
            registry=registry,
        )
        self.refused_clients = Gauge(
            "penstock_runtime_hub_refused_clients",
            "Processes that the hub has not accepted since its start: their secret, hash key or release is another.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.refused = Counter(
            "penstock_runtime_registrations_refused",
            "Registrations that this process cannot use: damaged, of another version, secret or hash_key.",
            ["reason"],
            registry=registry,
        )


class Registrations:
    """The registrations of one client, stored by its task whenever some are `unsent`. One event loop owns it."""

    def __init__(self, config: DiscoveryConfig, *, problem: Callable[[], str]) -> None:
        """Have none.

        Args:
            config: times.
            problem: says why the registry has not stored one in time.
        """
        self.current: dict[WorkerId, StoredRegistration] = {}
        self.wake = asyncio.Event()
        """Set when there is something to do for the task that stores."""
        self._unsent: dict[WorkerId, StoredRegistration] = {}
        """Those that the registry does not have as they are, and those withdrawn."""
        self._config = config
        self._problem = problem

    async def register(self, instance: Instance) -> "StoredRegistration":
        """Register, and wait until it is stored.

        Raises:
            Unavailable: it is not stored in time.
        """
        registration = StoredRegistration(self, instance)
        self.current[instance.worker_id] = registration
        self._send(registration)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await registration.stored.wait()
        except TimeoutError as error:
            self._withdraw(registration)  # where only the answer was lost
            raise Unavailable(
                f"{self._problem()}; waited {self._config.connect_timeout_s:g} s (connect_timeout_s)"
            ) from error
        return registration

    async def close(self) -> None:
        """Withdraw all."""
        for registration in tuple(self.current.values()):
            await registration.close()

    def resend_all(self) -> None:
        """Store all again: the registry may have lost them, or forgets what is not renewed."""
        for worker_id, registration in self.current.items():
            self._unsent.setdefault(worker_id, registration)

    def unsent(self) -> "Iterator[tuple[StoredRegistration, Instance | None]]":
        """Yield what is to be stored, with None for what is to be deleted, each once; the caller calls `sent` for what it stored."""
        tried: dict[WorkerId, tuple[StoredRegistration, Instance | None]] = {}
        while True:
            for worker_id, registration in self._unsent.items():
                is_current = self.current.get(worker_id) is registration
                instance = registration.instance if is_current else None
                if tried.get(worker_id) != (registration, instance):
                    break
            else:
                return
            tried[worker_id] = (registration, instance)
            yield registration, instance

    def sent(self, registration: "StoredRegistration", instance: Instance | None) -> None:
        """Note that the registry has what `unsent` yielded, unless that has changed meanwhile."""
        worker_id = registration.instance.worker_id
        if self._unsent.get(worker_id) is not registration:
            return
        is_current = self.current.get(worker_id) is registration
        if instance is (registration.instance if is_current else None):
            del self._unsent[worker_id]
            registration.stored.set()

    async def until_due(self, renew_s: float | None) -> bool:
        """Wait until something changes; return False where `renew_s` has passed instead (None: never)."""
        try:
            async with asyncio.timeout(renew_s):
                await self.wake.wait()
        except TimeoutError:
            return False
        self.wake.clear()
        return True

    def _send(self, registration: "StoredRegistration") -> None:
        registration.stored.clear()
        self._unsent[registration.instance.worker_id] = registration
        self.wake.set()

    def _withdraw(self, registration: "StoredRegistration") -> None:
        worker_id = registration.instance.worker_id
        if self.current.get(worker_id) is registration:
            del self.current[worker_id]
            self._send(registration)


class StoredRegistration:
    """One worker's registration, stored again as long as it lives."""

    def __init__(self, owner: Registrations, instance: Instance) -> None:
        self.instance = instance
        self.stored = asyncio.Event()
        """Set while the registry has it as it is."""
        self._owner = owner

    async def update(self, instance: Instance) -> None:
        if self._owner.current.get(instance.worker_id) is self:
            self.instance = instance
            self._owner._send(self)

    async def close(self) -> None:
        owner = self._owner
        if owner.current.get(self.instance.worker_id) is not self:
            return
        owner._withdraw(self)
        try:
            async with asyncio.timeout(owner._config.connect_timeout_s):
                await self.stored.wait()
        except TimeoutError:
            _log.warning(
                "withdrawal_not_stored", worker=self.instance.name, fix="its lease expires by itself"
            )


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
