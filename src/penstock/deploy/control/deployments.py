"""Finds a running deployment of this user on this host: its supervisor, or a frontend."""

from pathlib import Path

from penstock.core.errors import Unavailable
from penstock.deploy.control.frontend_address import DEFAULT_URL, FrontendAddress, base_of
from penstock.deploy.control.hosted import Hosted, choose, hosted
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME

_FLAGS = "--name, --url or --part"


async def find_deployment(
    *, name: str | None = None, url: str | None = None, part: str | None = None
) -> LocalConnector:
    """Return a connector of the only running deployment, or of the one with this name, URL and part; it has answered.

    Raises:
        Unavailable: none runs, or none fits, or it does not answer.
        Overloaded: it has no room for a caller.
        ConfigError: several fit; the text names them. Or `url` is no URL.
    """
    asked = [each for each in _living() if each.record is not None and not each.record.follows]
    if not asked:
        raise Unavailable("no deployment of this user runs on this host; start one with penstock serve")
    url = None if url is None else base_of(url)
    found = choose(asked, name=name, url=url, part=part, flags=_FLAGS)
    socket = found.directory / SOCKET_NAME
    if not socket.exists():
        raise Unavailable(f"{found.name}: has not started yet; penstock ps shows what it does")
    connector = LocalConnector(socket)
    await connector.scale()
    return connector


def find_frontend(
    url: str | None, *, name: str | None = None, part: str | None = None, flags: str = _FLAGS
) -> FrontendAddress:
    """Find the frontend that a command talks to.

    Args:
        url: what `--url` says; None is the only running deployment with frontends here, or port 8000 where there is none.
        name: the deployment's name, where several run.
        part: which part of the deployment, where several run here.
        flags: what the command has to choose by, for its user.

    Raises:
        Unavailable: no deployment fits, or it has no frontend on this host.
        ConfigError: several fit; the text names them. Or `url` is no URL.
    """
    living = _living()
    serving = [each for each in living if each.record is not None and each.record.url]
    base = None if url is None else base_of(url)
    if name is None and part is None:
        if base is not None:
            known = [each for each in serving if each.record is not None and each.record.url == base]
            return FrontendAddress(base, certificate=_certificate(known[0]) if len(known) == 1 else None)
        if not serving:
            return FrontendAddress(DEFAULT_URL, is_guess=True)
    try:
        found = choose(serving, name=name, part=part, url=base, flags=flags)
    except Unavailable:
        other = choose(living, name=name, part=part, url=base, flags=flags)
        raise Unavailable(
            f"{other.name}: no frontend of it runs on this host; name one of another host by --url"
        ) from None
    assert found.record is not None, "it has a URL"
    return FrontendAddress(found.record.url, name=found.name, certificate=_certificate(found))


def _living() -> list[Hosted]:
    return [each for each in hosted() if each.is_live]


def _certificate(found: Hosted) -> Path | None:
    return Path(found.record.certificate) if found.record is not None and found.record.certificate else None
