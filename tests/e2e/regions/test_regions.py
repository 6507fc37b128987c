"""Three regions with 80 ms between them, each a deployment of its own with links to the others: they tell of prefixes and help each other.

Meanwhile a region is killed, a cable is cut, and a worker is killed.
"""

import json
import os
import re
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.host import Host, text_of, until
from tests.support.triangle import Triangle, triangle

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]
NAMES = ("us", "eu", "asia")
STREAMS, TOKENS = 4, 300
DELAY_S = 0.04
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 100


class Region:
    """A deployment of one worker, with links to the others."""

    def __init__(self, number: int, laid: Triangle, folder: Path, stack: ExitStack) -> None:
        self.number, self.name = number, NAMES[number]
        self.url = "http://127.0.0.1:8000"
        self._others = [(NAMES[n], laid.address(number, n)) for n in range(3) if n != number]
        self.host = Host(laid.names[number], folder / self.name, stack)

    def up(self) -> None:
        regions = ", ".join(f"{{name: {name}, urls: ['http://{at}:8000']}}" for name, at in self._others)
        settings = (
            f"regions=[{regions}]", f"router.location.region={self.name}", "frontend.host=0.0.0.0",
            "roles.aggregated.engine=mock", "roles.aggregated.mock.speedup=0.5",
            f"roles.aggregated.max_running_requests={STREAMS}", "supervision.spare_processes=0",
        )  # fmt: skip
        words = [word for setting in settings for word in ("--set", setting)]
        self.host.up(str(self.host.folder.parent / "graph.yaml"), *words)

    def workers(self) -> dict:
        return {each["name"]: each for each in self.host.get(f"{self.url}/admin/workers")["workers"]}

    def ready(self) -> set[str]:
        return {name for name, each in self.workers().items() if each["condition"] == "ready"}

    def sees(self, *regions: str) -> bool:
        return self.ready() == {"worker-1", *(f"link-{name}" for name in regions)}

    def metric(self, name: str, labels: str = "") -> float:
        """Give the largest value of a metric whose series has these labels first."""
        start = f"penstock_router_{name}{labels}"
        lines = self.host.text(f"{self.url}/metrics").splitlines()
        return max((float(line.split()[-1]) for line in lines if line.startswith(start)), default=-1.0)

    def ask(self, prompt: str) -> None:
        body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": 2}
        words = ("-sS", "--fail-with-body", "-H", "Content-Type: application/json", "-d", json.dumps(body))
        command = self.host.command("curl", *words, f"{self.url}/v1/completions")
        subprocess.run(command, check=True, capture_output=True)

    def own_requests(self) -> int:
        return (self.workers()["worker-1"]["load"] or {}).get("running_requests", 0)

    def streams(self, count: int) -> list:
        """Begin streams of `STREAMS` prompts."""
        contents = [f"Tell me {index % STREAMS}" for index in range(count)]
        return [self.host.stream(self.url, TOKENS, content) for content in contents]

    def kill(self) -> None:
        """Kill every process of the region."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.host.name], check=True, capture_output=True, text=True
        )
        for pid in done.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


def test_three_regions_help_each_other(tmp_path):
    (tmp_path / "graph.yaml").write_text("model: demo\n")
    with triangle() as laid, ExitStack() as stack:
        us, eu, asia = regions = [Region(number, laid, tmp_path, stack) for number in range(3)]
        for one, other in laid.sides:
            laid.carry(one, other, delay_s=DELAY_S)
        for region in regions:
            region.up()
        for region in regions:
            region.host.wait(r"^penstock +ready")
        until(lambda: us.sees("eu", "asia") and eu.sees("us", "asia") and asia.sees("us", "eu"))

        # Each measures the way, which the graphs do not say, and shows it.
        for one, other in ((us, "eu"), (eu, "asia"), (asia, "us")):
            labels = f'{{region="{other}"'
            until(lambda: one.metric("link_round_trip_seconds", labels) >= 2 * DELAY_S)  # noqa: B023 - it is waited for
        assert re.search(r"link-eu .* \d+\.\d ms away, 1 of 1 frontends", us.host.penstock("ps"))

        # One tells the others of a long prompt that its worker holds, and the routers there count it.
        def hears() -> bool:
            eu.ask(LONG_PROMPT)  # noted once the link has asked
            return us.metric("advertised_chunks") >= 3

        until(hears)
        assert eu.metric("advertised_chunks") <= 0, "the others have computed nothing yet"
        us.ask(LONG_PROMPT)
        (decision,) = us.host.get(f"{us.url}/admin/explain?last=1")["decisions"]
        blocks = {each["worker"]: each["overlap_blocks"] for each in decision["candidates"]}
        assert blocks["worker-1"] == 0
        assert blocks["link-eu"] >= 3 * 256 // 16

        # An idle region keeps its requests: the others are 80 ms away.
        alone = [text_of(stream) for stream in us.streams(STREAMS)]
        assert [tokens for _, tokens in alone] == [TOKENS] * STREAMS
        assert eu.own_requests() == asia.own_requests() == 0

        # What is more than one worker's share goes to both others; eu is killed whole under it, and one way to asia is cut.
        streams = us.streams(3 * STREAMS)
        until(lambda: us.own_requests() and eu.own_requests() and asia.own_requests())
        eu.kill()
        laid.carry(0, 2, delay_s=DELAY_S, cut_from=2)
        assert [text_of(stream) for stream in streams] == 3 * alone, "the same tokens as undisturbed"
        until(lambda: us.sees() and asia.sees())
        laid.carry(0, 2, delay_s=DELAY_S)
        until(lambda: us.sees("asia") and asia.sees("us"))

        # Its only worker is killed under streams, which go on in the other region.
        streams = us.streams(STREAMS)
        until(us.own_requests)
        os.kill(us.workers()["worker-1"]["pid"], signal.SIGKILL)
        assert [text_of(stream) for stream in streams] == alone
