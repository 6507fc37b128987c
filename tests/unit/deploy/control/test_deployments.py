"""Which frontend a command talks to that names none, and which certificate it trusts there."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.control.deployments import find_frontend
from penstock.deploy.control.frontend_address import FrontendAddress
from penstock.deploy.control.record import DeploymentRecord, Origin, keep_record
from penstock.deploy.state import RuntimeDirectory

BLUE, GREEN = "http://127.0.0.1:9001", "https://127.0.0.1:9002"
Place = Callable[..., None]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Give a function that makes the private directory of a running deployment."""
    with tempfile.TemporaryDirectory(prefix="p-") as parent:
        monkeypatch.setenv("XDG_RUNTIME_DIR", parent)
        made = []

        def make(
            name: str,
            url: str = "",
            certificate: str = "",
            *,
            directory: str = "/elsewhere",
            part: str | None = None,
        ) -> None:
            made.append(RuntimeDirectory())
            keep_record(
                made[-1].path,
                DeploymentRecord(
                    name=name,
                    pid=os.getpid(),
                    started_s=1.0,
                    stop_s_max=2.0,
                    origin=Origin(file=f"/graphs/{name}.yaml", directory=directory, part=part),
                    url=url,
                    certificate=certificate,
                ),
            )

        yield make
        for directory in made:
            directory.remove()


def test_without_a_deployment_it_is_port_8000(place: Place) -> None:
    assert find_frontend(None) == FrontendAddress("http://127.0.0.1:8000", is_guess=True)
    place("workers")
    assert find_frontend(None).is_guess, "workers alone have no frontend"
    assert find_frontend("http://a:1/v1/") == FrontendAddress("http://a:1")


def test_the_only_deployment_is_found_with_its_certificate(place: Place) -> None:
    place("workers")
    place("green", GREEN, "/tls/green.pem")
    found = FrontendAddress(GREEN, name="green", certificate=Path("/tls/green.pem"))
    assert find_frontend(None) == find_frontend(None, name="green") == found
    assert find_frontend(GREEN) == FrontendAddress(GREEN, certificate=Path("/tls/green.pem"))
    assert find_frontend("https://other:9002").certificate is None


def test_of_several_one_is_named_or_was_started_here(place: Place) -> None:
    place("blue", BLUE)
    place("green", GREEN)
    with pytest.raises(ConfigError) as refused:
        find_frontend(None)
    assert refused.value.message == (
        f"2 deployments fit: blue at {BLUE} of /graphs/blue.yaml (--part all, or {os.getpid()}), green at {GREEN} of"
        f" /graphs/green.yaml (--part all, or {os.getpid()}); choose one by --name, --url or --part"
    )
    assert find_frontend(None, name="green").url == GREEN
    assert find_frontend(BLUE, name="blue").url == BLUE
    with pytest.raises(Unavailable, match=f"called blue at {GREEN} of this user"):
        find_frontend(GREEN, name="blue")
    place("here", "http://127.0.0.1:9003", directory=str(Path.cwd()))
    assert find_frontend(None).name == "here"


def test_a_part_without_frontends_says_so(place: Place) -> None:
    place("chat", BLUE, part="frontend")
    place("chat", part="decode")
    assert find_frontend(None, name="chat").url == BLUE
    with pytest.raises(Unavailable, match="chat: no frontend of it runs on this host; name one of another"):
        find_frontend(None, part="decode")
    with pytest.raises(Unavailable, match="called red of this user"):
        find_frontend(None, name="red")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://[::1", ""]
)
def test_what_is_no_url_is_refused(place: Place, url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url: .*expected a URL such as http"):
        find_frontend(url)
