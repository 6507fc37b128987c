"""Other regions in the graph: each is another deployment, to which this one has a link."""

from collections.abc import Sequence

import pydantic

from penstock.core.config import wrong
from penstock.core.types.instances import Location
from penstock.engine.openai.config import RegionConfig
from penstock.engine.registry import LINK_ENGINE
from penstock.graph.role import HardwareName, RoleSpec
from penstock.perf.topology import NetworkPath

REGIONS_MAX = 64


class RegionSpec(RegionConfig):
    """Another region, which gets requests where waiting here would cost more than the way."""

    distance: NetworkPath | None = None
    """Latency and bandwidth to the region, one way; null: those of `router.topology` between regions. `latency_s` counts until the link has measured it."""
    max_running_requests: int | None = pydantic.Field(default=None, ge=1)
    """Most requests in the batch of one of its workers; null: 256, or what its role here has."""
    max_waiting_requests: int | None = pydantic.Field(default=None, ge=1)
    """Most requests that wait in one of its workers."""
    hardware: HardwareName = "cpu"
    """Device type of its workers, by which requests there are priced; cpu: nobody says."""


def check_regions(regions: Sequence[RegionSpec], here: str) -> None:
    """Check that each region is another one; errors are pydantic's."""
    names = [region.name for region in regions]
    for name in names:
        if names.count(name) > 1:
            raise wrong(f"regions: {name!r} is there twice; put all its frontends into one urls")
        if name == here:
            raise wrong(
                f"regions: {name!r} is this deployment's own region (router.location.region); name other regions alone"
            )
    seen: dict[str, str] = {}
    for region in regions:
        for url in region.urls:
            if url in seen:
                raise wrong(
                    f"regions: {url} is a frontend of {seen[url]!r} and of {region.name!r}; a frontend is of one region"
                )
            seen[url] = region.name


def link_role(region: RegionSpec, here: str) -> RoleSpec:
    """Give the settings of the worker that is the link to a region.

    Args:
        region: the other one.
        here: the name of this one.
    """
    args = region.model_dump(mode="json", exclude=_NOT_OF_THE_ENGINE) | {"here": here}
    return RoleSpec().model_copy(
        update={
            "engine": LINK_ENGINE,
            "engine_args": args,
            "hardware": region.hardware,
            "max_running_requests": region.max_running_requests,
            "max_waiting_requests": region.max_waiting_requests,
            "locations": (Location(region=region.name),),
        }
    )


_NOT_OF_THE_ENGINE = {"distance", "max_running_requests", "max_waiting_requests", "hardware"}
