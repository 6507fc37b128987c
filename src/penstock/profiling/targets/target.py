"""The seam between a sweep and what it measures."""

from dataclasses import dataclass
from typing import Protocol

from penstock.perf.profile.profile import DecodePoint, PrefillPoint
from penstock.profiling.cells import DecodeCell, Limits, PrefillCell


@dataclass(frozen=True, slots=True)
class Description:
    """What a profile says of its origin, as the fields of `Profile` of the same name."""

    engine: str
    model: str
    engine_version: str
    hardware: str
    machine: str
    kv_bytes_per_token: float = 0.0
    kv_capacity_tokens: int = 0


class Target(Protocol):
    """An engine that answers one measurement at a time and is idle in between."""

    @property
    def limits(self) -> Limits: ...

    @property
    def description(self) -> Description: ...

    async def prefill(self, cell: PrefillCell) -> PrefillPoint:
        """Measure once, from sending the prompts to the last one's first token; the point says what it really was.

        Raises:
            EngineError, Unavailable: it failed, in words of its own.
        """
        ...

    async def decode(self, cell: DecodeCell) -> DecodePoint:
        """Measure once the time between two tokens while all sequences decode.

        Raises:
            EngineError, Unavailable: it failed, in words of its own.
        """
        ...
