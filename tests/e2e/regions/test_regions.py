"""Three regions with 80 ms between them, each a deployment of its own with links to the others: overflow, a region that is killed, and cut cables."""

import os
import re
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.host import TOKENS, Host, text_of, until
from tests.support.triangle import Triangle, triangle

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]
NAMES = ("us", "eu", "asia")
STREAMS = 4
DELAY_S = 0.04


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

    def link(self, other: str) -> dict:
        return self.workers()[f"link-{other}"]["load"]["link"]

    def gauge(self, noun: str, other: str) -> float:
        """Give a metric of the link to another region."""
        start = f'penstock_router_link_{noun}{{region="{other}"'
        lines = self.host.text(f"{self.url}/metrics").splitlines()
        return max((float(line.split()[-1]) for line in lines if line.startswith(start)), default=-1.0)

    def own_requests(self) -> int:
        return (self.workers()["worker-1"]["load"] or {}).get("running_requests", 0)

    def streams(self, count: int) -> list:
        return [self.host.stream(self.url, content=f"Tell me {index}") for index in range(count)]

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
            until(lambda one=one, other=other: 2 * DELAY_S <= one.link(other)["round_trip_s"] < 3 * DELAY_S)
            until(lambda one=one, other=other: one.gauge("round_trip_seconds", other) >= 2 * DELAY_S)
            assert re.search(rf"link-{other} .* \d+\.\d ms away, 1 of 1 frontends", one.host.penstock("ps"))

        # An idle region keeps its requests: the others are 80 ms away.
        alone = [text_of(us.host.stream(us.url, content=f"Tell me {n}")) for n in range(1)]
        assert alone[0][1] == TOKENS
        assert eu.own_requests() == asia.own_requests() == 0

        # What is more than one worker's share goes to both others; eu is killed whole under it, and one way to asia is cut.
        streams = us.streams(3 * STREAMS)
        until(lambda: us.own_requests() and eu.own_requests() and asia.own_requests())
        eu.kill()
        laid.carry(0, 2, delay_s=DELAY_S, cut_from=2)
        texts = [text_of(stream) for stream in streams]
        assert texts[0] == alone[0]
        assert [tokens for _, tokens in texts] == [TOKENS] * len(texts)
        until(lambda: us.sees() and asia.sees())
        laid.carry(0, 2, delay_s=DELAY_S)
        eu.up()
        until(lambda: us.sees("eu", "asia") and asia.sees("us", "eu"))

        # The same requests undisturbed have the same tokens.
        assert [text_of(stream) for stream in us.streams(3 * STREAMS)] == texts

        # Its only worker is killed under streams, which go on in other regions.
        streams = us.streams(STREAMS)
        until(us.own_requests)
        os.kill(us.workers()["worker-1"]["pid"], signal.SIGKILL)
        assert [text_of(stream) for stream in streams] == texts[:STREAMS]
