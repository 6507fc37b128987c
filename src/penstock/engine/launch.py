"""How an engine is started: the same description starts it in a worker, and is printed by `penstock graph render`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.kv_events.subscriber import PublisherAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """What a worker calls to start its engine, with which arguments, in which environment.

    Attributes:
        call: the class or function that takes the arguments, as `vllm.AsyncEngineArgs`.
        version: the engine and version whose names these are; "" for Penstock's own.
        arguments: plain values by the engine's names; what is not here keeps the engine's default.
        environment: variables that are set for the engine's processes.
        kv_events: where the engine is told to publish its KV events; None: it publishes none.
    """

    call: str
    version: str = ""
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_events: PublisherAddress | None = None
