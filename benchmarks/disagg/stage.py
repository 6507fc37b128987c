"""Measures sides in turns, all under the same load."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.disagg.measured import Measured, measure, measure_quiet
from benchmarks.disagg.model import SIZES
from benchmarks.disagg.sides import deployed
from benchmarks.disagg.traffic import Traffic, Users
from benchmarks.disagg.workload import Arrival, StreamsAndPrompts
from benchmarks.processes.served import Served
from penstock.cli.scale import change_role
from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import FrontendAddress
from penstock.worker.step_log import read_steps

_ROLE_CHANGES = 2


@dataclass(slots=True)
class Stage:
    """`rate_per_s`: long prompts. `problems`: a sentence for each failure."""

    directory: Path
    model_dir: Path
    workload: StreamsAndPrompts
    rate_per_s: float = 0.0
    quiet_ttft_s: list[float] = field(default_factory=list)
    quiet_kv_transfer_s: list[float] = field(default_factory=list)
    role_changes_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def set_load(
        self, flags: Sequence[str], *, prefill_share: float, quiet_prompts: int, then_measure: bool = False
    ) -> Measured | None:
        """Measure prompts without other load, which sets the rate of prompts, and role changes.

        Args:
            flags: of `penstock serve`, with one prefill worker.
            prefill_share: share of its time that the prefill worker shall compute prompts.
            quiet_prompts: number of prompts without other load.
            then_measure: measure the same deployment under load, as `run` would with a deployment of its own.

        Returns:
            What was measured under load.
        """
        loaded: Traffic | None = None
        steps = self.directory / "quiet"
        with deployed(self.model_dir, flags, steps) as deployment:
            traffic: Traffic = uvloop.run(self._ask_quietly(deployment, prefill_share, quiet_prompts))
            for role in (Role.DECODE, Role.PREFILL) * _ROLE_CHANGES:
                self.role_changes_s.append(
                    change_role(FrontendAddress(deployment.url), "prefill-1", role).took_s
                )
            if then_measure:
                prompts = self.workload.long_prompts(self.rate_per_s)
                loaded = uvloop.run(self._ask(deployment, self.workload, prompts))
        logs = read_steps(steps)
        self.quiet_ttft_s, self.quiet_kv_transfer_s = measure_quiet(traffic, logs)
        return None if loaded is None else measure(loaded, logs)

    def run(
        self, sides: Mapping[int, Sequence[str]], turns: int, *, without_prompts: int
    ) -> dict[int, list[Measured]]:
        """Measure each side once a turn, every other turn in the opposite order; each turn has its own prompts.

        Args:
            sides: flags of `penstock serve` by side.
            turns: number of turns.
            without_prompts: the side that has streams only.
        """
        measured: dict[int, list[Measured]] = {side: [] for side in sides}
        for turn in range(turns):
            workload = dataclasses.replace(self.workload, seed=self.workload.seed + turn)
            prompts = workload.long_prompts(self.rate_per_s)
            for side, flags in list(sides.items())[:: -1 if turn % 2 else 1]:
                arrivals = [] if side == without_prompts else prompts
                steps = self.directory / f"{turn}-{side}"
                measured[side].append(self._run(workload, flags, steps, arrivals))
        return measured

    def _run(
        self, workload: StreamsAndPrompts, flags: Sequence[str], steps: Path, arrivals: Sequence[Arrival]
    ) -> Measured:
        with deployed(self.model_dir, flags, steps) as deployment:
            traffic: Traffic = uvloop.run(self._ask(deployment, workload, arrivals))
        return measure(traffic, read_steps(steps))

    async def _ask_quietly(self, deployment: Served, prefill_share: float, count: int) -> Traffic:
        users = Users(deployment, self.workload, SIZES["vocab_size"])
        try:
            await users.ask_quietly(count)
            self.rate_per_s = prefill_share / users.quiet_ttft_s()
        finally:
            users.close()
        self.problems += users.traffic.problems
        return users.traffic

    async def _ask(
        self, deployment: Served, workload: StreamsAndPrompts, arrivals: Sequence[Arrival]
    ) -> Traffic:
        users = Users(deployment, workload, SIZES["vocab_size"])
        try:
            await users.run(arrivals)
        finally:
            users.close()
        self.problems += users.traffic.problems
        return users.traffic
