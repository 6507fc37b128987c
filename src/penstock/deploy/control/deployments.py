"""Finds the running deployments of this user on this machine."""

from pathlib import Path

from penstock.core.errors import ConfigError, Overloaded, PenstockError, Unavailable
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME, Deployment
from penstock.deploy.state import runtime_directories


async def find_deployment(*, name: str | None = None, url: str | None = None) -> LocalConnector:
    """Return a connector of the only running deployment, or of the one with this name or URL.

    Raises:
        Unavailable: none runs, or none fits.
        Overloaded: there is one, and it has no room for a caller.
        ConfigError: several fit; the text names them.
    """
    running = await _running()
    fitting = [
        (deployment, connector)
        for deployment, connector in running
        if (name is None or deployment.name == name) and (url is None or deployment.url == url.rstrip("/"))
    ]
    listed = ", ".join(f"{deployment.name} at {deployment.url}" for deployment, _ in running)
    if not fitting:
        wanted = "".join(f" {flag} {value}" for flag, value in (("--name", name), ("--url", url)) if value)
        raise Unavailable(
            f"no deployment{wanted} of this user runs on this machine"
            + (f"; running: {listed}" if listed else "; start one with penstock serve")
        )
    if len(fitting) > 1:
        raise ConfigError(f"several deployments run: {listed}; choose one with --name or --url")
    return fitting[0][1]


async def _running() -> list[tuple[Deployment, LocalConnector]]:
    found: list[tuple[Deployment, LocalConnector]] = []
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
            found.append((connector.deployment, connector))
    if full is not None and not found:
        raise full
    return found
