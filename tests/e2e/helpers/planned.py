"""`penstock serve` with a planner that decides fast, for tests with real processes."""

import asyncio
import contextlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from penstock.core.types.instances import ReplicaState, Role, Scale
from penstock.seams import ScalingConnector

COMMAND = [sys.executable, "-m", "penstock"]
TIMEOUT_S = 150.0
FAST: dict[str, object] = {
    "planner.react_period_s": 0.5,
    "planner.floor_period_s": 2,
    "planner.cool_down_s": 3,
    "planner.cold_s": 1,
    "supervision.spare_processes": 0,
    "worker.drain_timeout_s": 0.3,
}
"""Settings by which a worker is added within a second of load and taken away within twenty seconds without."""


@dataclass(slots=True)
class Served:
    """A running deployment; `lines` is what it printed until it was ready."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)


@contextlib.contextmanager
def serving(*arguments: str, **settings: object) -> Iterator[Served]:
    """Run `penstock serve ARGUMENTS` with `FAST` and other settings, by path in the graph, until the context ends."""
    flags = [f"--set={name}={value}" for name, value in (FAST | settings).items()]
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *arguments, *flags], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if re.search(r"^penstock +ready", line):
                break
        url = re.search(r"http://\S+", lines[-1])
        assert url is not None, lines
        yield Served(url[0], process, lines)
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


def ready(scale: Scale) -> dict[Role, int]:
    """Count the ready workers of each role."""
    return {
        limit.role: sum(each.state is ReplicaState.READY for each in scale.of(limit.role))
        for limit in scale.limits
    }


async def until(connector: ScalingConnector, holds: Callable[[Scale], bool]) -> Scale:
    """Wait until the workers satisfy `holds`; returns them."""
    scale = await connector.scale()
    while not holds(scale):
        scale = await connector.scale(scale.sequence)
    return scale


async def until_ready(connector: ScalingConnector, counts: Mapping[Role, int]) -> Scale:
    """Wait until each role has so many ready workers; returns them."""
    return await until(connector, lambda scale: ready(scale) == counts)


def run(main: Awaitable[None]) -> None:
    """Run a scenario within `TIMEOUT_S`."""

    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await main

    asyncio.run(bounded())


def command(*arguments: str) -> str:
    """Run `penstock ARGUMENTS`; returns what it prints."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def planner_metrics(url: str) -> dict[tuple[str, ...], float]:
    """Give the planner's samples by (name, value of the only label)."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("penstock_planner_")
    }
