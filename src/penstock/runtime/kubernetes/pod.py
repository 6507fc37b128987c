"""The pod that this process runs in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

POD_NAME, POD_UID = "PENSTOCK_POD_NAME", "PENSTOCK_POD_UID"
"""Variables that a pod's downward API sets."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod of this process."""

    name: str
    uid: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Read the downward API's variables; None where they are not set, as outside of a cluster."""
        name, uid = environment.get(POD_NAME), environment.get(POD_UID)
        return cls(name, uid) if name and uid else None
