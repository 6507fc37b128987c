"""Topology labels of a process, for costs that depend on the distance between two processes."""

from typing import Self

from penstock.core.config import Config
from penstock.core.types.instances import Instance


class Location(Config):
    """A host and its rack, zone and region; an empty label counts as equal to the other side's."""

    host: str = ""
    """The machine."""
    rack: str = ""
    """Machines behind one switch."""
    zone: str = ""
    """Racks in one building or campus."""
    region: str = ""
    """Zones with fast links between them."""

    @classmethod
    def of(cls, instance: Instance) -> Self:
        """Return the location that a worker has registered."""
        return cls(host=instance.host, rack=instance.rack, zone=instance.zone, region=instance.region)
