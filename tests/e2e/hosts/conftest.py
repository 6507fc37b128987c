"""Two hosts of network namespaces, with a cable between them, and what a frontend of the first one sees."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cable import Cable, bad_cable, cable
from tests.support.host import Host, text_of, until

GRAPH = Path(__file__).parents[3] / "examples" / "two_hosts.yaml"
FIRST, SECOND = "worker-1@host-a", "worker-1@host-b"
TOKENS = 300


class Pair:
    """Both hosts, and the cable between them."""

    def __init__(self, laid: Any, folder: Path, stack: ExitStack) -> None:
        self.laid, self.folder = laid, folder
        self.first, self.second = (
            Host(name, folder / f"host-{letter}", stack)
            for name, letter in zip(laid.names, "ab", strict=True)
        )
        self.hub = f"tcp://{laid.addresses[0]}:7400"
        self.url = f"http://{laid.addresses[0]}:8000"

    @staticmethod
    def flags(settings: dict[str, Any]) -> list[str]:
        usual = {"roles.aggregated.engine": "mock", "supervision.spare_processes": 0}
        return [flag for name, value in (usual | settings).items() for flag in ("--set", f"{name}={value}")]

    def start_first(self, settings: dict[str, Any], *more: str, ready: str = r"^penstock +ready") -> None:
        """Start the first host, which has the registry."""
        flags = self.flags(settings | {"runtime.hub": self.hub})
        self.first.up(str(GRAPH), *flags, *more)
        self.first.wait(ready)

    def start_second(self, settings: dict[str, Any], run: str = "aggregated") -> Any:
        """Start the second host; returns its process."""
        process = self.second.up(str(GRAPH), "--join", self.hub, "--run", run, *self.flags(settings))
        self.second.wait(r"^penstock +ready +no frontend here")
        return process

    def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["name"]: worker for worker in self.first.get(f"{self.url}/admin/workers")["workers"]}

    def until_ready(self, *names: str) -> None:
        """Wait until these workers, and no others, are ready."""
        until(
            lambda: (
                {name for name, each in self.workers().items() if each["condition"] == "ready"} == set(names)
            )
        )

    def begin_streams(self, count: int) -> list[Any]:
        """Begin streams at both workers."""
        streams = [self.first.stream(self.url, TOKENS) for _ in range(count)]

        def all_run() -> bool:
            running = [(each["load"] or {}).get("running_requests", 0) for each in self.workers().values()]
            return sum(running) == count and min(running) > 0

        until(all_run)
        return streams

    def undisturbed(self) -> tuple[str, int]:
        """Give the text of a stream and its tokens, while nothing is wrong."""
        text = text_of(self.second.stream(self.url, TOKENS))
        assert text[1] == TOKENS
        return text


@contextmanager
def _pair(lay: Callable[[], AbstractContextManager[Cable]], folder: Path) -> Iterator[Pair]:
    with lay() as laid, ExitStack() as stack:
        yield Pair(laid, folder, stack)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with _pair(cable, tmp_path) as made:
        yield made


@pytest.fixture
def bad_pair(tmp_path: Path) -> Iterator[Pair]:
    """Hosts whose cable may be bad."""
    with _pair(bad_cable, tmp_path) as made:
        yield made
