"""One deployment on two hosts of network namespaces: three commands, a cut cable, secrets and addresses that are wrong."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cable import cable
from tests.support.host import TIMEOUT_S, TOKENS, Host, text_of, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]
GRAPH = Path(__file__).parents[3] / "examples" / "two_hosts.yaml"


@pytest.fixture
def hosts(tmp_path):
    with cable() as laid, ExitStack() as stack:
        pair = [
            Host(name, tmp_path / f"host-{letter}", stack)
            for name, letter in zip(laid.names, "ab", strict=True)
        ]
        yield laid, *pair


def test_three_commands_and_a_cable_that_is_cut_under_streams(hosts):
    laid, first, second = hosts
    hub = f"tcp://{laid.addresses[0]}:7400"
    settings = [
        "roles.aggregated.engine=mock", "roles.aggregated.mock.speedup=0.5", "supervision.spare_processes=0",
        "request_plane.heartbeat_interval_s=0.5", "request_plane.heartbeat_timeout_s=2",
    ]  # fmt: skip
    flags = [flag for setting in settings for flag in ("--set", setting)]
    first.up(str(GRAPH), "--set", f"runtime.hub={hub}", *flags)
    first.wait(r"^penstock +ready")
    second.up(str(GRAPH), "--join", hub, "--run", "aggregated", *flags)
    second.wait(r"^penstock +ready +no frontend here")
    url = f"http://{laid.addresses[0]}:8000"

    def workers():
        return {worker["name"]: worker for worker in first.get(f"{url}/admin/workers")["workers"]}

    def ready():
        return {name for name, worker in workers().items() if worker["condition"] == "ready"}

    both = {"worker-1@host-a", "worker-1@host-b"}
    until(lambda: ready() == both)
    assert workers()["worker-1@host-b"]["address"].startswith(f"tcp://{laid.addresses[1]}:")
    undisturbed = text_of(second.stream(url))
    assert undisturbed[1] == TOKENS
    streams = [first.stream(url) for _ in range(4)]

    def all_run():
        running = [(worker["load"] or {}).get("running_requests", 0) for worker in workers().values()]
        return sum(running) == len(streams) and min(running) > 0

    until(all_run)
    laid.pull()
    until(lambda: ready() == {"worker-1@host-a"})
    assert [text_of(stream) for stream in streams] == [undisturbed] * len(streams)
    laid.plug_in()
    until(lambda: ready() == both)
    assert text_of(second.stream(url)) == undisturbed
    assert "failed" not in " ".join(second.lines), "nobody was started again"


def test_a_wrong_secret_and_an_address_without_a_hub_end_in_one_line(hosts):
    laid, first, second = hosts
    hub = f"tcp://{laid.addresses[0]}:7400"
    engine = ("--set", "roles.aggregated.engine=mock", "--set", "supervision.spare_processes=0")
    nobody = second.up(str(GRAPH), "--join", hub, "--run", "aggregated", *engine)
    second.wait(rf"^penstock: hub at {hub}: .*is the supervisor running")
    assert nobody.wait(timeout=TIMEOUT_S) == 1
    first.up(str(GRAPH), "--set", f"runtime.hub={hub}", "--run", "aggregated", *engine)
    first.wait(r"^penstock +ready")
    stranger = second.up(str(GRAPH), "--join", hub, *engine, secret="a guess of a stranger")
    second.wait(r"^penstock: hub at .*deployment secret: the peer's proof does not fit")
    assert stranger.wait(timeout=TIMEOUT_S) == 1
    first.wait("client_refused.*deployment secret")
