"""Moves bytes between registered memory of any two processes, one-sided and without blocking.

A library in its own right: it needs nothing of the serving stack.

    async with TransferAgent("reader") as agent:
        kv = agent.register(np.zeros(1 << 20, np.uint8), "kv")
        peer = await agent.connect(metadata)  # what `TransferAgent.metadata()` of the other process gave
        handle = agent.post(TransferOp.READ, kv.ranges(0, 4096), peer.region("kv").ranges(8192, 4096), peer)
        await handle.wait()
"""

from penstock.core.descriptors import Access, Descriptors, MemoryKind, Region, RegionInfo, TransferOp
from penstock.core.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    MemoryInUse,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferRefused,
)
from penstock.core.types.kv import KvLayout, RankLayout
from penstock.transfer.agent import TransferAgent
from penstock.transfer.config import CopyConfig, StorageConfig, TcpConfig, TlsConfig, TransferConfig
from penstock.transfer.regions.arena import Arena
from penstock.transfer.regions.regions import Registration, RemoteRegion
from penstock.transfer.requests.handles import PreparedTransfer, Telemetry, TransferHandle, TransferState
from penstock.transfer.requests.peer import Peer
from penstock.transfer.storage.file import FileRegion
from penstock.transfer.storage.object import ObjectRegion

__all__ = [
    "Access",
    "Arena",
    "ChecksumMismatch",
    "CopyConfig",
    "DeadlineExceeded",
    "Descriptors",
    "FileRegion",
    "KvLayout",
    "MemoryInUse",
    "MemoryKind",
    "ObjectRegion",
    "Peer",
    "PeerLost",
    "PreparedTransfer",
    "RankLayout",
    "Region",
    "RegionInfo",
    "Registration",
    "RemoteRegion",
    "StorageConfig",
    "TcpConfig",
    "Telemetry",
    "TlsConfig",
    "TransferAgent",
    "TransferCancelled",
    "TransferConfig",
    "TransferError",
    "TransferHandle",
    "TransferOp",
    "TransferRefused",
    "TransferState",
]
