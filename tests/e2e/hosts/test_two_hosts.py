"""One deployment on two hosts of network namespaces: a cut cable, a bad one, ports, secrets and addresses that are wrong."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.e2e.hosts.conftest import FIRST, GRAPH, SECOND, TOKENS
from tests.support.host import TIMEOUT_S, text_of, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]
STREAMS = 4
SETTINGS = {
    "roles.aggregated.mock.speedup": 0.1,  # streams are still there when the faults come
    "request_plane.heartbeat_interval_s": 0.5,
    "request_plane.heartbeat_timeout_s": 2,
}
PORTS = range(7500, 7506)
PROMPT = "Tell me what a penstock is, and which of its parts decides where a prompt is computed. " * 4


def test_three_commands_and_a_cable_that_is_cut_under_streams(pair):
    pair.start_first(SETTINGS)
    pair.start_second(SETTINGS)
    pair.until_ready(FIRST, SECOND)
    assert pair.workers()[SECOND]["address"].startswith(f"tcp://{pair.laid.addresses[1]}:")
    undisturbed = pair.undisturbed()
    streams = pair.begin_streams(STREAMS)
    pair.laid.pull()
    pair.until_ready(FIRST)
    assert [text_of(stream) for stream in streams] == [undisturbed] * STREAMS
    pair.laid.plug_in()
    pair.until_ready(FIRST, SECOND)
    assert pair.undisturbed() == undisturbed
    assert "failed" not in " ".join(pair.second.lines), "nobody was started again"


def skewed():
    """Begin a command so that its processes' monotonic clocks are a day ahead, on kernels that can (5.6), and their date an hour."""
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
    date = ("env", f"LD_PRELOAD={library}", "FAKETIME=+3600s", "FAKETIME_DONT_FAKE_MONOTONIC=1")
    words = ("unshare", "--time", "--monotonic", "86400", "--boottime", "86400")
    works = subprocess.run([*words, "true"], check=False, capture_output=True).returncode == 0
    return (*(words if works else ()), *date)


@pytest.mark.nightly
@pytest.mark.needs("faketime")
def test_streams_go_on_over_a_bad_network_between_hosts_of_different_clocks(bad_pair):
    """It is slow and loses frames, or carries them in one direction only: no token is wrong or missing."""
    pair = bad_pair
    pair.second.clock = skewed()
    settings = SETTINGS | {"request_plane.heartbeat_timeout_s": 3}
    pair.start_first(settings)
    pair.start_second(settings)
    pair.until_ready(FIRST, SECOND)
    undisturbed = pair.undisturbed()
    streams = pair.begin_streams(STREAMS)
    pair.laid.carry(delay_s=0.2, loss=0.01)
    streams += [pair.first.stream(pair.url, TOKENS) for _ in range(STREAMS)]
    assert [text_of(stream) for stream in streams] == [undisturbed] * len(streams)
    pair.laid.carry()
    for silent in (0, 1):
        pair.until_ready(FIRST, SECOND)
        streams = pair.begin_streams(STREAMS)
        pair.laid.carry(cut=silent)
        pair.until_ready(FIRST)
        assert [text_of(stream) for stream in streams] == [undisturbed] * STREAMS
        pair.laid.carry()
    pair.until_ready(FIRST, SECOND)
    assert pair.undisturbed() == undisturbed
    assert "failed" not in " ".join(pair.second.lines), "nobody was started again"


def test_a_wrong_secret_and_an_address_without_a_hub_end_in_one_line(pair):
    join = (str(GRAPH), "--join", pair.hub, "--run", "aggregated", *pair.flags({}))
    nobody = pair.second.up(*join)
    pair.second.wait(rf"^penstock: hub at {pair.hub}: .*is the supervisor running")
    assert nobody.wait(timeout=TIMEOUT_S) == 1
    pair.start_first({}, "--run", "aggregated")
    stranger = pair.second.up(*join, secret="a guess of a stranger")
    pair.second.wait(r"^penstock: hub at .*deployment secret: the peer's proof does not fit")
    assert stranger.wait(timeout=TIMEOUT_S) == 1
    pair.first.wait("client_refused.*deployment secret")


def test_kv_crosses_hosts_that_listen_on_no_other_ports_than_their_range(pair, tmp_path):
    """Workers listen on every address, and advertise that of their host."""
    first, second = pair.first, pair.second
    role = {"weight_dtype": "float32"}
    graph = {
        "model": "demo",
        "frontend": {"host": pair.laid.addresses[0], "port": 8000},
        "supervision": {"spare_processes": 0},
        "worker": {"kv_transfer": {"transfer": {"transports": ["tcp"]}}},  # NIXL listens on ports of its own
        "router": {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}},
        "roles": {"prefill": role, "decode": role},
    }
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump(graph))

    def flags(address):
        ports = f"{PORTS.start}-{PORTS.stop - 1}"
        runtime = {"listen": "tcp://0.0.0.0:0", "advertise": address, "ports": ports}
        return [flag for name, value in runtime.items() for flag in ("--set", f"runtime.{name}={value}")]

    here, there = map(flags, pair.laid.addresses)
    first.up(str(file), "--set", f"runtime.hub={pair.hub}", "--run", "frontend,prefill", *here)
    first.wait("^prefill-1 +ready")
    second.up(str(file), "--join", pair.hub, "--run", "decode", *there)
    second.wait("^penstock +ready")
    first.wait("^penstock +ready")
    until(lambda: {each["condition"] for each in pair.workers().values()} == {"ready", "prefill_only"})
    text, tokens = text_of(second.stream(pair.url, max_tokens=20, content=PROMPT))
    assert text
    assert tokens == 20
    until(lambda: (pair.workers()["decode-1@host-b"]["load"] or {}).get("kv_reads"))
    decode = pair.workers()["decode-1@host-b"]
    (read,) = decode["load"]["kv_reads"]
    assert read["transport"] == "tcp"
    assert read["num_bytes"] > 0
    assert decode["address"] == f"tcp://{pair.laid.addresses[1]}:{PORTS.start}"
    assert first.listening_ports() == {7400, 8000, *PORTS[:2]}
    assert second.listening_ports() == {*PORTS[:2]}
