"""The region as a server: checks its name, its release and its clock."""

from collections.abc import Sequence
from urllib.parse import urlencode

from penstock.core.clock import wall_time_s
from penstock.core.errors import PenstockError, WrongServerError
from penstock.core.log import get_logger
from penstock.core.types.load import LINK_VERSION, DeploymentLoads, LinkProblem
from penstock.engine.openai.connection import UntrustedError, WrongKeyError
from penstock.engine.openai.region.config import LinkConfig
from penstock.engine.openai.region.frontends import RegionFrontends
from penstock.engine.openai.server import DEPLOYMENT, ServedModel, Server
from penstock.engine.openai.text import TextCodec

CLOCK_SKEW_S = 30.0
"""A larger difference of clocks is logged: certificates may then be refused, and logs of both regions do not match."""
_log = get_logger()


class RegionServer(Server):
    """A region's frontends as one server. One event loop owns it."""

    def __init__(self, config: LinkConfig, names: Sequence[str], codec: TextCodec) -> None:
        """Describe it; nothing is asked before `check`.

        Raises:
            ConfigError: the key file or a certificate cannot be read.
        """
        self.frontends = RegionFrontends(config, {"X-Penstock-Region": config.here})
        super().__init__(config.urls[0], config.server(), names, codec, connection=self.frontends)
        self._link = config
        self.clock_skew_s = 0.0
        """Seconds by which the region's clock is ahead of ours, half a round trip more or less."""
        self._says_skew = False
        self.problem = ""
        """A `LinkProblem` of the latest check; empty if it succeeded."""

    async def check(self) -> ServedModel:
        try:
            served = await self._check()
        except PenstockError as error:
            self.problem = _problem_of(error)
            if self.problem is LinkProblem.CERTIFICATE:
                await self.frontends.send_refusals()
            raise
        self.problem = ""
        return served

    async def _check(self) -> ServedModel:
        served = await super().check()
        if served.owner != DEPLOYMENT:
            raise WrongServerError(
                f"{self.name}: no frontends of Penstock answer there, or those of a release without regions; name its frontends in"
                f" regions.{self._link.name}.urls"
            )
        return served

    def load_path(self) -> str:
        said = {"region": self._link.here, "link": LINK_VERSION, "skew_s": f"{-self.clock_skew_s:.3f}"}
        return f"/load?{urlencode(said)}"

    def take_loads(self, loads: DeploymentLoads) -> None:
        where, wanted = loads.region, self._link.name
        if where == self._link.here:
            raise WrongServerError(
                f"{self.name}: its frontends are of {where!r}, the region of this link; name the frontends of {wanted!r} in"
                f" regions.{wanted}.urls"
            )
        if not loads.link_version or abs(loads.link_version - LINK_VERSION) > 1:
            theirs = f"link version {loads.link_version}" if loads.link_version else "an older release"
            raise WrongServerError(
                f"{self.name}: it has {theirs}, this one link version {LINK_VERSION}; at most one may lie between them: upgrade"
                " the older one"
            )
        if where != wanted:
            said = f"are of region {where!r}" if where else "do not say their region"
            raise WrongServerError(
                f"{self.name}: its frontends {said}, expected {wanted!r}; set router.location.region there, or name it so in"
                " regions here"
            )
        self._note_clock(loads.time_s - wall_time_s())

    def _note_clock(self, skew_s: float) -> None:
        self.clock_skew_s = skew_s
        is_far = abs(skew_s) > CLOCK_SKEW_S
        if is_far and not self._says_skew:
            _log.warning(
                "region_clock_differs",
                region=self._link.name,
                ahead_s=round(skew_s, 1),
                fix="have both regions' hosts keep their time by NTP",
            )
        self._says_skew = is_far


def _problem_of(error: PenstockError) -> LinkProblem:
    if isinstance(error, UntrustedError):
        return LinkProblem.CERTIFICATE
    if isinstance(error, WrongKeyError):
        return LinkProblem.KEY
    return LinkProblem.OTHER_SERVER if isinstance(error, WrongServerError) else LinkProblem.UNREACHABLE
