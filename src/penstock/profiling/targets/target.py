"""The interface between a sweep and its target."""

from dataclasses import dataclass
from typing import Protocol

from penstock.perf.profile.profile import DecodePoint, PrefillPoint
from penstock.profiling.cells import DecodeCell, Limits, PrefillCell


@dataclass(frozen=True, slots=True)
class Description:
    """Origin of a profile; fields as in `Profile`."""

    engine: str
    model: str
    engine_version: str
    hardware: str
    machine: str
    kv_bytes_per_token: float = 0.0
    kv_capacity_tokens: int = 0


class Target(Protocol):
    """Runs one measurement at a time and is idle in between."""

    @property
    def limits(self) -> Limits: ...

    @property
    def description(self) -> Description: ...

    async def prefill(self, cell: PrefillCell) -> PrefillPoint:
        """Measure once from sending the prompts to the last first token; the point has the actual token counts.

        Raises:
            EngineError, Unavailable: it failed, in words of its own.
        """
        ...

    async def decode(self, cell: DecodeCell) -> DecodePoint:
        """Measure once the ITL while all sequences decode.

        Raises:
            EngineError, Unavailable: it failed, in words of its own.
        """
        ...
