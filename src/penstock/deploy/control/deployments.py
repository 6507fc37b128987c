"""Finds the running deployments of this user on this machine."""

from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError, Overloaded, PenstockError, Unavailable
from penstock.deploy.control.hosted import describe_part, is_part
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME, Deployment
from penstock.deploy.control.record import DeploymentRecord, read_record
from penstock.deploy.state import runtime_directories


async def find_deployment(
    *, name: str | None = None, url: str | None = None, part: str | None = None
) -> LocalConnector:
    """Return a connector of the only running deployment, or of the one with this name, URL and part.

    Raises:
        Unavailable: none runs, or none fits.
        Overloaded: there is one, and it has no room for a caller.
        ConfigError: several fit; the text names them.
    """
    running = await _running()
    fitting = [
        each
        for each in running
        if (name is None or each.deployment.name == name)
        and (url is None or each.deployment.url == url.rstrip("/"))
        and (part is None or is_part(each.record, part))
    ]
    listed = ", ".join(str(each) for each in fitting or running)
    if not fitting:
        flags = (("--name", name), ("--url", url), ("--part", part))
        wanted = "".join(f" {flag} {value}" for flag, value in flags if value)
        raise Unavailable(
            f"no deployment{wanted} of this user runs on this machine"
            + (f"; running: {listed}" if listed else "; start one with penstock serve")
        )
    if len(fitting) > 1:
        raise ConfigError(f"several deployments run: {listed}; choose one with --name, --url or --part")
    return fitting[0].connector


@dataclass(frozen=True, slots=True)
class _Running:
    deployment: Deployment
    connector: LocalConnector
    record: DeploymentRecord | None

    def __str__(self) -> str:
        at = f" at {self.deployment.url}" if self.deployment.url else " without frontends"
        return f"{self.deployment.name}{at}{describe_part(self.record)}"


async def _running() -> list[_Running]:
    found: list[_Running] = []
    full: Overloaded | None = None
    for directory in runtime_directories():
        connector = LocalConnector(Path(directory, SOCKET_NAME))
        try:
            await connector.scale()
        except PenstockError as error:
            if isinstance(error, Overloaded):
                full = error
            if connector.deployment is None:
                continue  # its supervisor has ended, or has no room to say who it is
        if connector.deployment is not None:
            found.append(_Running(connector.deployment, connector, read_record(Path(directory))))
    if full is not None and not found:
        raise full
    return found
