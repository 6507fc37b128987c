"""Two regions with 80 ms between them, each a deployment of its own that has the other as a worker: one loses its workers under streams."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cable import bad_cable
from tests.support.host import TOKENS, Host, text_of, until

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.needs("ip", "curl", "namespaces")]
GRAPH = str(Path(__file__).parents[3] / "examples" / "two_hosts.yaml")
LINK = str(Path(__file__).parents[3] / "examples" / "regions.yaml")
STREAMS = 4
CHECKS = "{interval_s: 0.3, timeout_s: 3, retry_s_max: 1}"


class Region:
    """A deployment of one worker, and its link to the other region."""

    def __init__(self, name: str, namespace: str, address: str, folder: Path, stack: ExitStack) -> None:
        self.name, self.address = name, address
        self.url = f"http://{address}:8000"
        self.hub = f"tcp://{address}:7400"
        self.host = Host(namespace, folder / name, stack)
        self.link = Host(namespace, folder / f"link-of-{name}", stack)
        self.host.up(GRAPH, *self.flags(f"runtime.hub={self.hub}"))
        self.host.wait(r"^penstock +ready")

    def flags(self, *settings: str) -> list[str]:
        all_settings = (
            *settings, f"router.location.region={self.name}", "supervision.spare_processes=0",
            "request_plane.heartbeat_interval_s=0.5", "request_plane.heartbeat_timeout_s=4",
        )  # fmt: skip
        words = [word for setting in all_settings for word in ("--set", setting)]
        if len(settings) == 1:
            words += ["--set", "roles.aggregated.engine=mock", "--set", "roles.aggregated.mock.speedup=0.5"]
            words += ["--set", f"roles.aggregated.max_running_requests={STREAMS}"]
        return words

    def know(self, other: "Region") -> None:
        """Have the other region as a worker."""
        settings = (
            f"roles.aggregated.engine.args.url={other.url}", f"roles.aggregated.engine.args.health={CHECKS}",
            f"roles.aggregated.locations=[{{region: {other.name}}}]",
        )  # fmt: skip
        self.link.up(LINK, "--join", self.hub, "--run", "aggregated", *self.flags(*settings))
        self.link.wait(r"^penstock +ready +no frontend here")

    def workers(self) -> dict:
        return {each["name"]: each for each in self.host.get(f"{self.url}/admin/workers")["workers"]}

    def ready(self) -> set[str]:
        return {name for name, each in self.workers().items() if each["condition"] == "ready"}

    def own_requests(self) -> int:
        (own,) = (each for name, each in self.workers().items() if name.endswith(f"@{self.name}"))
        return (own["load"] or {}).get("running_requests", 0)


def test_regions_help_each_other_and_no_request_goes_round(tmp_path):
    with bad_cable() as laid, ExitStack() as stack:
        us, eu = (
            Region(name, namespace, address, tmp_path, stack)
            for name, namespace, address in zip(("us", "eu"), laid.names, laid.addresses, strict=True)
        )
        undisturbed = text_of(us.host.stream(us.url))
        assert undisturbed[1] == TOKENS
        laid.carry(delay_s=0.04)
        us.know(eu)
        eu.know(us)
        until(lambda: us.ready() == {"worker-1@us", "worker-1@link-of-us"})
        until(lambda: eu.ready() == {"worker-1@eu", "worker-1@link-of-eu"})

        # An idle region keeps its requests: the other one is 80 ms away.
        assert text_of(us.host.stream(us.url)) == undisturbed
        assert eu.own_requests() == 0

        # More than one worker's share goes to the other region, with the same tokens.
        prompts = [f"Tell me {index}" for index in range(2 * STREAMS)]
        streams = [us.host.stream(us.url, content=prompt) for prompt in prompts]
        until(lambda: us.own_requests() and eu.own_requests())
        texts = [text_of(stream) for stream in streams]
        alone = [text_of(us.host.stream(us.url, content=prompt)) for prompt in prompts]
        assert texts == alone

        # Its only worker is killed under streams, which go on in the other region.
        streams = [us.host.stream(us.url) for _ in range(STREAMS)]
        until(lambda: us.own_requests() == STREAMS)
        (pid,) = (each["pid"] for name, each in us.workers().items() if name == "worker-1@us")
        os.kill(pid, signal.SIGKILL)
        until(lambda: eu.own_requests() == STREAMS)
        assert [text_of(stream) for stream in streams] == [undisturbed] * STREAMS

        # The network between them is cut, and heals.
        laid.carry(delay_s=0.04, cut=0)
        until(lambda: us.ready() == {"worker-1@us"} and eu.ready() == {"worker-1@eu"})
        assert text_of(us.host.stream(us.url)) == undisturbed
        laid.carry(delay_s=0.04)
        until(lambda: len(us.ready()) == len(eu.ready()) == 2)
