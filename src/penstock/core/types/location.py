"""Where something runs, for what depends on how far two of them are apart."""

from typing import Self

from penstock.core.config import Config
from penstock.core.types.instances import Instance


class Location(Config):
    """A host and what it is in; what is not said is taken to be the same as the other side's."""

    host: str = ""
    """The machine."""
    rack: str = ""
    """Machines behind one switch."""
    zone: str = ""
    """Racks in one building or campus."""
    region: str = ""
    """Zones with fast lines between them."""

    @classmethod
    def of(cls, instance: Instance) -> Self:
        """Give the location that a worker has registered."""
        return cls(host=instance.host, rack=instance.rack, zone=instance.zone, region=instance.region)
