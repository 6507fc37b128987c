"""Where sides are measured one after the other, all under the load that the first one sets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from penstock.bench.disagg.measured import Measured, measure
from penstock.bench.disagg.model import SIZES
from penstock.bench.disagg.sides import deployed
from penstock.bench.disagg.traffic import Traffic, Users
from penstock.bench.disagg.workload import Workload
from penstock.bench.served import Served
from penstock.core.types import Role
from penstock.deploy.role_command import change_role
from penstock.worker.step_log import read_steps

_ROLE_CHANGES = 2


@dataclass(slots=True)
class Stage:
    """`rate_per_s` is of the prompts; `problems` are sentences about what failed."""

    directory: Path
    model_dir: Path
    workload: Workload
    rate_per_s: float = 0.0
    role_changes_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def play_apart(self, flags: Sequence[str], *, prefill_share: float, quiet_prompts: int) -> Measured:
        """Measure a side with one prefill worker, set the load by it, and change roles when all is over.

        Args:
            flags: of `penstock serve`.
            prefill_share: of its time that it is to compute prompts, by what one takes while there is nothing else.
            quiet_prompts: how many find that out.
        """
        steps = self.directory / "apart"
        with deployed(self.model_dir, flags, steps) as deployment:
            traffic: Traffic = uvloop.run(self._ask(deployment, prefill_share, quiet_prompts))
            for role in (Role.DECODE, Role.PREFILL) * _ROLE_CHANGES:
                self.role_changes_s.append(change_role(deployment.url, "prefill-1", role).took_s)
        return measure(traffic, read_steps(steps))

    def play(self, name: str, flags: Sequence[str]) -> Measured:
        """Measure another side under the same load."""
        steps = self.directory / name
        with deployed(self.model_dir, flags, steps) as deployment:
            traffic: Traffic = uvloop.run(self._ask(deployment))
        return measure(traffic, read_steps(steps))

    async def _ask(self, deployment: Served, prefill_share: float = 0.0, quiet_prompts: int = 0) -> Traffic:
        users = Users(deployment, self.workload, SIZES["vocab_size"])
        try:
            if quiet_prompts:
                await users.ask_quietly(quiet_prompts)
                self.rate_per_s = prefill_share / users.quiet_ttft_s()
            await users.play(self.workload.long_prompts(self.rate_per_s))
        finally:
            users.close()
        self.problems += users.traffic.problems
        return users.traffic
