"""How long a byte of KV takes between any two workers, by where they are."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.location import Location
from penstock.router.config import RouterConfig


class KvWays:
    """Workers by slot. What lies before one is worked out when first asked for, and kept until somebody moves.

    One event loop owns it.
    """

    def __init__(self, config: RouterConfig, num_slots: int) -> None:
        """Know nobody.

        Args:
            config: says what lies between two locations.
            num_slots: of all columns.
        """
        self._config = config
        self._locations = [Location()] * num_slots
        self._rows: dict[Location, NDArray[np.float64]] = {}

    def put(self, slot: int, location: Location) -> None:
        """Note where a worker is."""
        if self._locations[slot] != location:
            self._locations[slot] = location
            self._rows.clear()

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        self._locations += [Location()] * (num_slots - len(self._locations))
        self._rows.clear()

    def byte_s(self, source: int | None) -> NDArray[np.float64]:
        """Give (num_slots,) seconds that a byte takes from the worker in a slot to each; None is somebody unknown."""
        here = Location() if source is None else self._locations[source]
        row = self._rows.get(here)
        if row is None:
            ways = [self._config.kv_way(here, there) for there in self._locations]
            row = self._rows[here] = 1.0 / np.array([way.bandwidth_bytes_per_s for way in ways])
            row.flags.writeable = False
        return row
