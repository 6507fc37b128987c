"""Plays all games on all cores, each once: what is known already is taken from the ledger."""

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from benchmarks.policies.cells import DEPLOYMENTS, TROUBLES, Cell, Effort, Trouble
from benchmarks.policies.game import Game, Place, describe, fingerprint, play, prepare_process
from benchmarks.policies.ledger import Figures, Ledger
from benchmarks.policies.saturation import SUSTAINED, find_saturation
from benchmarks.policies.workload import RECORDED, Workload
from penstock.core.errors import PenstockError
from penstock.deploy.causes import cause_of


@dataclass(frozen=True, slots=True)
class Files:
    """Where graphs, profiles, the recorded trace and the policies beside Penstock's own are; what is set in each graph."""

    examples: Path
    policies: Path
    trace: Path | None
    settings: tuple[str, ...] = ()

    def place(self, deployment: str) -> Place:
        graph, profile = DEPLOYMENTS[deployment]
        return Place(
            self.examples / "graphs" / f"{graph}.yaml",
            self.examples / "profiles" / f"{profile}.json",
            self.settings,
        )


@dataclass(slots=True)
class Results:
    """What came of it, for the summary; `runs` by cell, policy and seed, `workloads` by cell's first two names."""

    runs: dict[tuple[Cell, str, int], Figures] = field(default_factory=dict)
    workloads: dict[tuple[str, str], Figures] = field(default_factory=dict)
    saturation_rps: dict[tuple[str, str], float] = field(default_factory=dict)


class Arena:
    """Plays. Enter it; leaving it in any way ends its processes."""

    def __init__(self, files: Files, ledger: Ledger, policies: dict[str, str], jobs: int) -> None:
        """Start nothing.

        Args:
            files: what is read.
            ledger: what is known.
            policies: what to compare, by name: what `router.policy` takes.
            jobs: processes.
        """
        self._files = files
        self._ledger = ledger
        self._policies = policies
        self._pool = ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), prepare_process, (str(files.policies.resolve()),)
        )
        self._progress = Progress()

    async def __aenter__(self) -> Self:
        """Start the processes, deaf to what interrupts a terminal: this one ends them."""
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._pool.submit(os.getpid)
        finally:
            signal.signal(signal.SIGINT, handler)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()

    async def compare(self, cells: Sequence[Cell], effort: Effort) -> Results:
        """Find each deployment's saturation, and play every cell with every policy and seed.

        Raises:
            PenstockError: a game cannot be played.
        """
        results = Results()
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            groups.setdefault((cell.workload, cell.deployment), []).append(cell)
            requests, seeds = effort.of(cell)
            self._progress.plan(requests * len(seeds) * len(self._policies))
        try:
            async with asyncio.TaskGroup() as tasks:
                for mine in groups.values():
                    tasks.create_task(self._play_group(mine, effort, results))
        except BaseExceptionGroup as errors:
            raise cause_of(errors) from None
        return results

    async def _play_group(self, cells: Sequence[Cell], effort: Effort, results: Results) -> None:
        workload, deployment = cells[0].workload, cells[0].deployment
        place = self._files.place(deployment)
        sample = self._workload(workload, effort.requests, 1)
        about = await self._once(f"about {_name(sample, place)}", describe, place, sample)
        results.workloads[workload, deployment] = about
        saturation_rps = effort.saturation_rps.get(f"{workload}/{deployment}")
        if saturation_rps is None:
            saturation_rps = about["guess_rps"]
            if effort.tolerance is not None:
                saturation_rps = await self._search(place, sample, saturation_rps, effort.tolerance)
        results.saturation_rps[workload, deployment] = saturation_rps
        self._progress.start()
        async with asyncio.TaskGroup() as tasks:
            for cell in cells:
                requests, seeds = effort.of(cell)
                trouble = Trouble() if cell.trouble is None else TROUBLES[cell.trouble]
                rate_per_s = saturation_rps * cell.load / 100
                for seed in seeds:
                    played = self._workload(workload, requests, seed)
                    for policy, found in self._policies.items():
                        game = Game(place, played, rate_per_s, found, trouble)
                        tasks.create_task(self._play(cell, policy, game, results))

    async def _play(self, cell: Cell, policy: str, game: Game, results: Results) -> None:
        key = _key(game)
        is_known = self._ledger.get(key) is not None
        found = await self._once(key, play, game)
        results.runs[cell, policy, game.workload.seed] = found
        text = f"{cell.name} seed {game.workload.seed} {policy}: mean TTFT {found['ttft_mean_s']:.3f} s"
        if is_known:
            self._progress.skip(game.workload.requests)
        else:
            self._progress.advance(game.workload.requests, text)

    async def _search(self, place: Place, workload: Workload, guess_rps: float, tolerance: float) -> float:
        """Find the saturation of the best policy: the one that sustained a rate last is tried first at the next."""
        order = list(self._policies)

        async def sustains(policy: str, rate_per_s: float) -> bool:
            game = Game(place, workload, rate_per_s, self._policies[policy], Trouble())
            return (await self._once(_key(game), play, game))["served_share"] >= SUSTAINED

        async def is_sustained(rate_per_s: float) -> bool:
            self._progress.tell(f"{_name(workload, place)}: is {rate_per_s:.3g} requests/s sustained?")
            if await sustains(order[0], rate_per_s):
                return True
            others = await asyncio.gather(*(sustains(policy, rate_per_s) for policy in order[1:]))
            if not any(others):
                return False
            best = order.pop(1 + others.index(True))
            order.insert(0, best)
            return True

        return await find_saturation(is_sustained, guess_rps, tolerance=tolerance)

    def _workload(self, name: str, requests: int, seed: int) -> Workload:
        return Workload(name, requests, seed, self._files.trace if name == RECORDED else None)

    async def _once(self, key: str, function: Callable[..., Figures], *arguments: Any) -> Figures:
        """Have a process compute this, unless it is known."""
        known = self._ledger.get(key)
        if known is None:
            try:
                known = await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
            except BrokenProcessPool as error:
                raise PenstockError(
                    "a process of the bench was killed, perhaps as memory ran out; try fewer --jobs, and the same"
                    " --state to go on"
                ) from error
            self._ledger.put(key, known)
        return known


class Progress:
    """One line on stderr for each run that ends, with the time that is probably left."""

    def __init__(self) -> None:
        self._planned = self._done = 0
        self._began_s: float | None = None

    def plan(self, requests: int) -> None:
        self._planned += requests

    def skip(self, requests: int) -> None:
        """Count what was known already as never planned."""
        self._planned -= requests

    def start(self) -> None:
        """Measure from here, the first time."""
        self._began_s = self._began_s or perf_counter()

    def advance(self, requests: int, text: str) -> None:
        self._done += requests
        assert self._began_s is not None, "started before"
        left_s = (perf_counter() - self._began_s) * (self._planned - self._done) / self._done
        minutes, seconds = divmod(round(left_s), 60)
        self.tell(f"{text} ({100 * self._done / self._planned:.0f} %, {minutes}:{seconds:02d} left)")

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def default_jobs() -> int:
    return len(os.sched_getaffinity(0))


def _name(workload: Workload, place: Place) -> str:
    """Name what is played on what, contents included."""
    trace = "" if workload.trace is None else f"-{fingerprint(workload.trace)}"
    files = " ".join((f"{fingerprint(place.graph)}-{fingerprint(place.profile)}", *place.settings))
    return f"{workload.name}{trace} n={workload.requests} seed={workload.seed} on {place.graph.stem} {files}"


def _key(game: Game) -> str:
    trouble = game.trouble
    return (
        f"policy={game.policy} {_name(game.workload, game.place)} rate={game.rate_per_s:.6g}"
        f" slowness={trouble.slowness:g} load_delay={trouble.load_delay_s:g}"
    )
