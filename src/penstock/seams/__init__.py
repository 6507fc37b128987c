"""All protocols between packages, and nothing else: one file per seam, no code.

Implement one to plug in your own engine, request plane or policy; `penstock.testing` has a conformance
suite for each. Async methods do I/O; sync methods never block. Every seam has a `memory` or `mock`
implementation, the reference for all others.
"""

from penstock.core.routing_context import PriceColumns, RoutingContext
from penstock.seams.discovery import Discovery, Registration
from penstock.seams.dispatch import (
    DeltaSink,
    DirectClient,
    DirectSink,
    DirectStream,
    Hold,
    Interrupt,
    RequestDispatcher,
    RequestStream,
)
from penstock.seams.engine import (
    Announcing,
    Engine,
    HealthReporting,
    KvBlocks,
    KvGrouped,
    KvManaged,
    KvPartialBlocks,
    MediaReading,
    NativeKvTransfer,
    RoleAware,
    Sleeping,
)
from penstock.seams.event_carrier import BroadcastListener, BroadcastSink, EventCarrier
from penstock.seams.kv import KvLoad, KvNames, KvRun, KvSource, KvTier
from penstock.seams.request_plane import (
    Answer,
    Connection,
    EventSink,
    EventSource,
    FrontendSink,
    MediaAnswer,
    PlaneServer,
    RequestPlane,
    RequestPlaneClient,
    WorkerService,
    WorkerSink,
    WrittenTokens,
)
from penstock.seams.routing import ExplainedPolicy, HistoryPolicy, RoutingPolicy
from penstock.seams.scaling import ScalingConnector
from penstock.seams.transfer import Link, Move, RangeMover, Storage, TransferChannel, Transport, TransportHost

__all__ = [
    "Announcing",
    "Answer",
    "BroadcastListener",
    "BroadcastSink",
    "Connection",
    "DeltaSink",
    "DirectClient",
    "DirectSink",
    "DirectStream",
    "Discovery",
    "Engine",
    "EventCarrier",
    "EventSink",
    "EventSource",
    "ExplainedPolicy",
    "FrontendSink",
    "HealthReporting",
    "HistoryPolicy",
    "Hold",
    "Interrupt",
    "KvBlocks",
    "KvGrouped",
    "KvLoad",
    "KvManaged",
    "KvNames",
    "KvPartialBlocks",
    "KvRun",
    "KvSource",
    "KvTier",
    "Link",
    "MediaAnswer",
    "MediaReading",
    "Move",
    "NativeKvTransfer",
    "PlaneServer",
    "PriceColumns",
    "RangeMover",
    "Registration",
    "RequestDispatcher",
    "RequestPlane",
    "RequestPlaneClient",
    "RequestStream",
    "RoleAware",
    "RoutingContext",
    "RoutingPolicy",
    "ScalingConnector",
    "Sleeping",
    "Storage",
    "TransferChannel",
    "Transport",
    "TransportHost",
    "WorkerService",
    "WorkerSink",
    "WrittenTokens",
]
