"""Where a process runs: what the graph says, unless its environment says otherwise."""

import socket

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Location
from penstock.deploy.identity import location_here
from penstock.graph import build


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in ("HOST", "RACK", "ZONE", "REGION"):
        monkeypatch.delenv(f"PENSTOCK_{level}", raising=False)


def test_the_environment_overrides_the_graph_and_the_host_is_else_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert location_here(Location()) == Location(host=socket.gethostname())
    assert location_here(Location(host="gpu-7", zone="z")) == Location(host="gpu-7", zone="z")
    for level, name in (("HOST", "node-1"), ("REGION", "us "), ("RACK", "")):
        monkeypatch.setenv(f"PENSTOCK_{level}", name)
    assert location_here(Location(rack="r1", region="eu")) == Location(host="node-1", rack="r1", region="us")


@pytest.mark.parametrize("name", ["a@b", "a\nb", "a\x1b[2Jb", "a" * 254])
def test_a_host_that_cannot_name_workers_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PENSTOCK_HOST", name)
    with pytest.raises(ConfigError, match=r"^PENSTOCK_HOST: must be a printable name .* without '@', got 'a"):
        location_here(Location())
    with pytest.raises(ConfigError, match=r"router.location.host: must be a printable name"):
        build({"model": "demo", "router": {"location": {"host": name}}})


def test_a_region_may_have_any_printable_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REGION", "a@b")
    assert location_here(Location()).region == "a@b"
    monkeypatch.setenv("PENSTOCK_REGION", "a\x07b")
    with pytest.raises(ConfigError, match=r"^PENSTOCK_REGION: "):
        location_here(Location())


def test_workers_are_dealt_out_to_a_roles_locations_in_turn() -> None:
    said = {
        "replicas": 5,
        "engine": "mock",
        "locations": [{"region": "eu"}, {"region": "us", "zone": "us-1"}],
    }
    role = build({"model": "demo", "roles": {"aggregated": said}}).roles.aggregated
    assert role is not None
    assert [role.location_of(n).region for n in range(5)] == ["eu", "us", "eu", "us", "eu"]
    assert build({"model": "demo"}).roles.aggregated.location_of(3) == Location()
