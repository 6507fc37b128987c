"""Every seam of the system, and nothing else: protocols without code, a file for each.

Write one of these to plug in your own engine, plane or policy; `penstock.testing` holds a conformance
suite for each. Async methods do I/O; sync methods never block. Every seam has a `memory` (or `mock`)
implementation, which is the reference the others are tested against.
"""

from penstock.core.routing_context import PriceColumns, RoutingContext
from penstock.seams.discovery import Discovery, Registration
from penstock.seams.dispatch import RequestDispatcher, RequestStream
from penstock.seams.engine import Announcing, Engine, KvBlocks, KvTails, RoleAware
from penstock.seams.request_plane import (
    Answer,
    Connection,
    EventSink,
    FrontendSink,
    PlaneServer,
    RequestPlane,
    WayToWorkers,
    WorkerService,
    WorkerSink,
)
from penstock.seams.routing import ExplainedPolicy, HistoryPolicy, RoutingPolicy
from penstock.seams.transfer import Link, Move, TransferChannel, Transport, TransportHost

__all__ = [
    "Announcing",
    "Answer",
    "Connection",
    "Discovery",
    "Engine",
    "EventSink",
    "ExplainedPolicy",
    "FrontendSink",
    "HistoryPolicy",
    "KvBlocks",
    "KvTails",
    "Link",
    "Move",
    "PlaneServer",
    "PriceColumns",
    "Registration",
    "RequestDispatcher",
    "RequestPlane",
    "RequestStream",
    "RoleAware",
    "RoutingContext",
    "RoutingPolicy",
    "TransferChannel",
    "Transport",
    "TransportHost",
    "WayToWorkers",
    "WorkerService",
    "WorkerSink",
]
