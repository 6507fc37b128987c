"""This process's location from environment variables; on Kubernetes, the manifests set them from labels."""

import os
import socket

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Location, label_problem

_VARIABLES = {
    "host": "PENSTOCK_HOST", "rack": "PENSTOCK_RACK", "zone": "PENSTOCK_ZONE", "region": "PENSTOCK_REGION",
}  # fmt: skip


def location_here(configured: Location) -> Location:
    """Merge a configured location with the environment, which wins; the host defaults to this one.

    Raises:
        ConfigError: a variable has no name that can be used.
    """
    said = {level: os.environ.get(variable, "").strip() for level, variable in _VARIABLES.items()}
    for level, name in said.items():
        if problem := label_problem(name, is_host=level == "host"):
            raise ConfigError(f"{_VARIABLES[level]}: {problem}")
    location = configured.model_copy(update={level: name for level, name in said.items() if name})
    return location if location.host else location.model_copy(update={"host": socket.gethostname()})
