"""Where this process runs, as its environment says: in Kubernetes from labels, elsewhere from whoever starts it."""

import os
import socket

from penstock.core.types.location import Location

_VARIABLES = {
    "host": "PENSTOCK_HOST", "rack": "PENSTOCK_RACK", "zone": "PENSTOCK_ZONE", "region": "PENSTOCK_REGION",
}  # fmt: skip


def location_here(configured: Location) -> Location:
    """Complete what the graph says of a process's location; the environment overrides it, and the host is this one."""
    said = {level: os.environ.get(variable, "").strip() for level, variable in _VARIABLES.items()}
    location = configured.model_copy(update={level: name for level, name in said.items() if name})
    return location if location.host else location.model_copy(update={"host": socket.gethostname()})
