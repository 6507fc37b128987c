"""Two regions with 80 ms between them: one tells the other of a long prompt that its worker holds, and the router there counts it."""

import json
import subprocess
from contextlib import ExitStack

import pytest

from tests.support.cable import bad_cable
from tests.support.host import Host, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]
URL = "http://127.0.0.1:8000"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 100


def up(host: Host, here: str, other: str, address: str) -> None:
    settings = (
        f"regions=[{{name: {other}, urls: ['http://{address}:8000']}}]", f"router.location.region={here}",
        "frontend.host=0.0.0.0", "roles.aggregated.engine=mock", "supervision.spare_processes=0",
    )  # fmt: skip
    graph = host.folder.parent / "graph.yaml"
    host.up(str(graph), *(word for setting in settings for word in ("--set", setting)))


def ask(host: Host) -> None:
    body = {"model": "penstock-demo", "prompt": PROMPT, "max_tokens": 2}
    words = (
        "curl",
        "-sS",
        "--fail-with-body",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body),
    )
    subprocess.run(host.command(*words, f"{URL}/v1/completions"), check=True, capture_output=True)


def ready(host: Host) -> int:
    return sum(each["condition"] == "ready" for each in host.get(f"{URL}/admin/workers")["workers"])


def advertised_chunks(host: Host) -> float:
    lines = host.text(f"{URL}/metrics").splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("penstock_router_advertised_chunks")
    )


def test_a_region_counts_the_prefixes_that_another_one_tells_of(tmp_path):
    (tmp_path / "graph.yaml").write_text("model: demo\n")
    with bad_cable() as laid, ExitStack() as stack:
        us, eu = (
            Host(name, tmp_path / here, stack) for name, here in zip(laid.names, ("us", "eu"), strict=True)
        )
        laid.carry(delay_s=0.04)
        up(us, "us", "eu", laid.addresses[1])
        up(eu, "eu", "us", laid.addresses[0])
        for host in (us, eu):
            host.wait(r"^penstock +ready")
        for host in (us, eu):
            until(lambda host=host: ready(host) == 2)

        def hears() -> bool:
            ask(eu)  # noted once the link has asked
            return advertised_chunks(us) >= 3

        until(hears)
        assert advertised_chunks(eu) == 0, "us has computed nothing yet"
        ask(us)
        (decision,) = us.get(f"{URL}/admin/explain?last=1")["decisions"]
        blocks = {each["worker"]: each["overlap_blocks"] for each in decision["candidates"]}
        assert blocks["worker-1"] == 0
        assert blocks["link-eu"] >= 3 * 256 // 16

        laid.carry(delay_s=0.04, cut=1)
        until(lambda: ready(us) == 1)
        until(lambda: advertised_chunks(us) == 0)
