"""Topology labels of a process, for costs that depend on the distance between two processes."""

from typing import Self

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.types.instances import Instance

LABEL_LENGTH_MAX = 253
"""As of a name of DNS."""


def label_problem(name: str, *, is_host: bool) -> str:
    """Say why a label cannot be used; empty if it can. Workers are named `worker-1@HOST`, so a host has no '@'."""
    if len(name) > LABEL_LENGTH_MAX or not name.isprintable() or (is_host and "@" in name):
        without = " without '@'" if is_host else ""
        return f"must be a printable name of up to {LABEL_LENGTH_MAX} characters{without}, got {name[:80]!r}"
    return ""


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

    @pydantic.field_validator("host", "rack", "zone", "region")
    @classmethod
    def _check_label(cls, name: str, field: pydantic.ValidationInfo) -> str:
        if problem := label_problem(name, is_host=field.field_name == "host"):
            raise wrong(problem)
        return name

    @classmethod
    def of(cls, instance: Instance) -> Self:
        """Return the location that a worker has registered."""
        return cls(host=instance.host, rack=instance.rack, zone=instance.zone, region=instance.region)
