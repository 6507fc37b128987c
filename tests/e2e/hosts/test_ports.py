"""Prefill and decode on two hosts whose workers listen on a range of ports and advertise an address."""

from contextlib import ExitStack

import pytest
import yaml

from tests.support.cable import cable
from tests.support.host import Host, text_of, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]
RANGE = range(7500, 7506)
PROMPT = "Tell me what a penstock is, and which of its parts decides where a prompt is computed. " * 4


@pytest.fixture
def hosts(tmp_path):
    with cable() as laid, ExitStack() as stack:
        pair = [
            Host(name, tmp_path / f"host-{letter}", stack)
            for name, letter in zip(laid.names, "ab", strict=True)
        ]
        yield laid, *pair


def test_kv_crosses_hosts_that_listen_on_no_other_ports_than_their_range(hosts, tmp_path):
    laid, first, second = hosts
    hub = f"tcp://{laid.addresses[0]}:7400"
    role = {"weight_dtype": "float32"}
    graph = {
        "model": "demo",
        "frontend": {"host": laid.addresses[0], "port": 8000},
        "supervision": {"spare_processes": 0},
        "worker": {"kv_transfer": {"transfer": {"transports": ["tcp"]}}},  # NIXL listens on ports of its own
        "router": {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}},
        "roles": {"prefill": role, "decode": role},
    }
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump(graph))

    def flags(address):
        ports = f"{RANGE.start}-{RANGE.stop - 1}"
        runtime = {"listen": "tcp://0.0.0.0:0", "advertise": address, "ports": ports}
        return [flag for name, value in runtime.items() for flag in ("--set", f"runtime.{name}={value}")]

    here = flags(laid.addresses[0])
    first.up(str(file), "--set", f"runtime.hub={hub}", "--run", "frontend,prefill", *here)
    first.wait("^prefill-1 +ready")
    second.up(str(file), "--join", hub, "--run", "decode", *flags(laid.addresses[1]))
    second.wait("^penstock +ready")
    first.wait("^penstock +ready")
    url = f"http://{laid.addresses[0]}:8000"

    def workers():
        return {worker["name"]: worker for worker in first.get(f"{url}/admin/workers")["workers"]}

    until(lambda: {each["condition"] for each in workers().values()} == {"ready", "prefill_only"})
    text, tokens = text_of(second.stream(url, max_tokens=20, content=PROMPT))
    assert text
    assert tokens == 20
    until(lambda: (workers()["decode-1@host-b"]["load"] or {}).get("kv_reads"))
    (read,) = workers()["decode-1@host-b"]["load"]["kv_reads"]
    assert read["transport"] == "tcp"
    assert read["num_bytes"] > 0
    assert workers()["decode-1@host-b"]["address"] == f"tcp://{laid.addresses[1]}:{RANGE.start}"
    assert first.listening_ports() == {7400, 8000, *RANGE[:2]}
    assert second.listening_ports() == {*RANGE[:2]}
