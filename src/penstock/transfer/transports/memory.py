"""Transport `memory`: copies between agents of one process, and within one agent. The reference for all others."""

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from penstock.core.descriptors import (
    MAIN_MEMORY,
    Access,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import TransferError
from penstock.seams import Link, Move, TransferChannel, TransportHost
from penstock.transfer.regions.copies import CopyMove
from penstock.transfer.regions.regions import addresses_of, other_kind
from penstock.transfer.transports.quiet import QuietTransport

_COST = TransferCost(start_s=5e-6, range_s=2e-7, bytes_per_s=10e9)
"""A copy on two cores of an AMD EPYC: 10 to 19 GB/s, measured."""
_CONTACT_BYTES = 8


_by_contact: "WeakValueDictionary[bytes, MemoryTransport]" = WeakValueDictionary()
"""The started transports of this process."""


class MemoryTransport(QuietTransport):
    """Copies memory within this process."""

    name = "memory"
    checksums = False

    def __init__(self, *, threads: int, inline_bytes_max: int) -> None:
        """Begin without regions.

        Args:
            threads: native threads that share one copy.
            inline_bytes_max: copies up to this size run within `post`.
        """
        self.regions: dict[int, Region] = {}
        self.threads = threads
        self.inline_bytes_max = inline_bytes_max
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="transfer-memory")
        self.host: TransportHost | None = None
        self._contact = secrets.token_bytes(_CONTACT_BYTES)

    async def start(self, host: TransportHost) -> None:
        self.host = host
        _by_contact[self._contact] = self

    def contact(self) -> bytes:
        return self._contact

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        del access  # shown keys are checked whenever a peer asks
        if region.kind not in MAIN_MEMORY:
            return None
        self.regions[region_id] = region
        return b""

    async def deregister(self, region_id: int) -> None:
        self.regions.pop(region_id, None)

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        if link is None:
            return _MemoryChannel(self, self, "", regions)
        other = _by_contact.get(contact) if link.peer_pid == os.getpid() else None
        if other is None:
            raise TransferError(f"agent {link.peer} runs in another process")
        return _MemoryChannel(self, other, self._name, regions)

    def exposed_to(self, link: Link) -> Collection[int]:
        return self.regions if link.peer_pid == os.getpid() else ()

    async def close(self) -> None:
        _by_contact.pop(self._contact, None)
        self.executor.shutdown(wait=False)

    @property
    def _name(self) -> str:
        return self.host.name if self.host else ""


class _MemoryChannel:
    """Between the memory of one agent and another agent of this process, or itself. `asks` is the initiator's name."""

    def __init__(
        self, own: MemoryTransport, other: MemoryTransport, asks: str, regions: Mapping[int, RegionInfo]
    ) -> None:
        self._own = own
        self._other = other
        self._asks = asks
        self._regions = regions

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op
        kind = other_kind(MAIN_MEMORY, local, remote)
        if kind is not None:
            return f"{kind.value} is no memory of a process"
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        return _COST

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        return _MemoryMove(self, op, pairs, checksum=checksum)

    def forget(self, region_id: int) -> None: ...

    async def close(self) -> None: ...

    def copy(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> CopyMove:
        """Prepare the copy, authorised by the owner of the other memory."""
        keys = {region_id: info.key(op) for region_id, info in self._regions.items()}
        if self._other is not self._own and self._other.host is not None:
            self._other.host.authorize(self._asks, keys, pairs.remote, op)
        local = addresses_of(pairs.local, {i: region.address for i, region in self._own.regions.items()})
        remote = addresses_of(pairs.remote, {i: region.address for i, region in self._other.regions.items()})
        target, source = (local, remote) if op is TransferOp.READ else (remote, local)
        return CopyMove(
            target,
            source,
            pairs.lengths,
            executor=self._own.executor,
            threads=self._own.threads,
            inline_bytes_max=self._own.inline_bytes_max,
            checksum=checksum,
        )


class _MemoryMove:
    """A copy that the other agent authorises at every run, since its regions may have changed."""

    def __init__(self, channel: _MemoryChannel, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        self._channel = channel
        self._op = op
        self._pairs = pairs
        self._checksum = checksum

    def run_now(self) -> bool:
        return self._channel.copy(self._op, self._pairs, checksum=self._checksum).run_now()

    async def run(self) -> None:
        await self._channel.copy(self._op, self._pairs, checksum=self._checksum).run()
