"""Network latency and bandwidth between two locations, by the level at which they differ.

A table of a few levels instead of a matrix of hosts. Pairs of regions may be listed, as they differ most. It serves any
two locations: a router and a worker, or two workers with a KV transfer.
"""

from typing import Self

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.types.instances import Location


class NetworkPath(Config):
    """Latency and bandwidth of a network path."""

    latency_s: float = pydantic.Field(ge=0, le=60)
    """One-way seconds until the first byte arrives."""
    bandwidth_bytes_per_s: float = pydantic.Field(gt=0)
    """Bandwidth of one connection, in bytes per second."""


class RegionPair(NetworkPath):
    """The network path between two regions, in both directions."""

    one: str = pydantic.Field(min_length=1)
    """First region."""
    other: str = pydantic.Field(min_length=1)
    """Second region."""

    @pydantic.model_validator(mode="after")
    def _check_ends(self) -> Self:
        if self.one == self.other:
            raise wrong(f"one and other: must be two regions, got {self.one!r} twice; same_region is for one")
        return self


class Topology(Config):
    """Network paths by the widest level at which two locations differ.

    The defaults are orders of magnitude: a loopback; 25 Gbit/s behind one switch; 10 Gbit/s within a zone and, with a
    millisecond there and back, within a region; 1 Gbit/s and 80 ms there and back across an ocean. Measure yours.
    """

    same_host: NetworkPath = NetworkPath(latency_s=2e-5, bandwidth_bytes_per_s=5e9)
    """Between processes of one host."""
    same_rack: NetworkPath = NetworkPath(latency_s=5e-5, bandwidth_bytes_per_s=3.1e9)
    """Between hosts of one rack, or of unknown racks."""
    same_zone: NetworkPath = NetworkPath(latency_s=2e-4, bandwidth_bytes_per_s=1.25e9)
    """Between racks of one zone."""
    same_region: NetworkPath = NetworkPath(latency_s=5e-4, bandwidth_bytes_per_s=1.25e9)
    """Between zones of one region."""
    between_regions: NetworkPath = NetworkPath(latency_s=0.04, bandwidth_bytes_per_s=1.25e8)
    """Between regions without an entry in `pairs`."""
    pairs: tuple[RegionPair, ...] = ()
    """Paths between listed regions."""

    @pydantic.field_validator("pairs")
    @classmethod
    def _check_pairs(cls, pairs: tuple[RegionPair, ...]) -> tuple[RegionPair, ...]:
        seen: set[frozenset[str]] = set()
        for pair in pairs:
            ends = frozenset((pair.one, pair.other))
            if ends in seen:
                raise wrong(f"{pair.one} and {pair.other} are described twice; keep one, it holds both ways")
            seen.add(ends)
        return pairs

    def path(self, one: Location, other: Location) -> NetworkPath:
        """Give the network path between two locations."""
        if _differ(one.region, other.region):
            ends = {one.region, other.region}
            named = (pair for pair in self.pairs if {pair.one, pair.other} == ends)
            return next(named, self.between_regions)
        if _differ(one.zone, other.zone):
            return self.same_region
        if _differ(one.rack, other.rack):
            return self.same_zone
        return self.same_rack if _differ(one.host, other.host) else self.same_host


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other
