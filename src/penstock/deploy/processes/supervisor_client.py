"""Asks the supervisor what the live page shows of the whole deployment."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME
from penstock.frontend.watch.overview import (
    LatencyTarget,
    Overview,
    Percentiles,
    PlannerRound,
    RoleTermView,
    WorkerSpeed,
)
from penstock.graph.graph import Slo
from penstock.planner import decision_log
from penstock.planner.observation import Observation, ObservedWorker

_SECONDS = 10.0
_ROUNDS_MAX = 12
_TAIL_BYTES = 128 << 10
"""Of the planner's log: a round has some KB."""


class SupervisorClient:
    """A `frontend.watch.overview.Supervisor`. Each call has a connection of its own."""

    def __init__(self, runtime_dir: Path, slo: Slo | None) -> None:
        """Take the deployment's private directory, and its targets."""
        self._connector = LocalConnector(runtime_dir / SOCKET_NAME)
        self._target = (
            None
            if slo is None
            else LatencyTarget(ttft_s=slo.ttft_s, itl_s=slo.itl_s, percentile=slo.percentile)
        )
        self._read: tuple[int, int] = (0, 0)  # the log's inode and size
        self._rounds: tuple[PlannerRound, ...] = ()

    async def overview(self) -> Overview:
        """Describe the deployment over the last 10 seconds; raises PenstockError where the supervisor does not answer."""
        seen = await self._connector.observe(_SECONDS)
        scale = await self._connector.scale()
        deployment, demand = self._connector.deployment, seen.demand
        log = "" if deployment is None else deployment.planner_log
        return Overview(
            name="" if deployment is None else deployment.name,
            seconds=seen.seconds,
            arrivals_per_s=demand.arrivals_per_s,
            finished_per_s=demand.finished_per_s,
            failed_per_s=demand.failed_per_s,
            prompt_tokens_per_s=demand.input_tokens.total / seen.seconds,
            output_tokens_per_s=_generated_per_s(seen),
            cached_share=demand.cached_share,
            ttft=Percentiles.of(demand.ttft_s),
            itl=Percentiles.of(demand.itl_s),
            queued=demand.queued,
            oldest_queued_s=demand.oldest_queued_s,
            frontends=seen.frontends,
            silent=seen.silent,
            speeds={worker.name: _speed(worker) for worker in seen.workers},
            replicas=scale.replicas,
            target=self._target,
            planner=await asyncio.to_thread(self._planner, Path(log)) if log else None,
        )

    async def kill(self, worker: str) -> None:
        """Kill a worker's process; raises PenstockError where there is none, or nobody may."""
        await self._connector.kill(worker)

    def _planner(self, log: Path) -> tuple[PlannerRound, ...]:
        """Read the log's last rounds, if it has changed."""
        try:
            with log.open("rb") as file:
                status = os.fstat(file.fileno())
                version = status.st_ino, status.st_size
                if version != self._read:
                    file.seek(max(status.st_size - _TAIL_BYTES, 0))
                    self._rounds = _rounds(file.read(_TAIL_BYTES).splitlines(keepends=True))
                    self._read = version
        except OSError:
            return ()  # between two files, or not begun
        return self._rounds


def _rounds(lines: Sequence[bytes]) -> tuple[PlannerRound, ...]:
    found = (decision_log.decode(line) for line in reversed(lines))
    rounds = (_round(entry) for entry in found if isinstance(entry, decision_log.LoggedRound))
    return tuple(each for each, _ in zip(rounds, range(_ROUNDS_MAX), strict=False))


def _round(entry: decision_log.LoggedRound) -> PlannerRound:
    record, decision = entry.record, entry.record.decision
    return PlannerRound(
        number=record.number,
        time_s=entry.time_s,
        outcome=record.outcome,
        text=record.explain(),
        terms=()
        if decision is None
        else tuple(
            RoleTermView(
                role=term.role,
                now=term.now,
                floor=term.floor,
                reaction=term.reaction,
                keep=term.keep,
                choice=term.choice,
                why_not_fewer=term.why_not_fewer,
            )
            for term in decision.terms
        ),
        shortfall="" if decision is None else decision.shortfall,
    )


def _generated_per_s(seen: Observation) -> float:
    return sum(worker.generated_tokens_per_s for worker in seen.workers)


def _speed(worker: ObservedWorker) -> WorkerSpeed:
    return WorkerSpeed(
        prefilled_tokens_per_s=worker.prefilled_tokens_per_s,
        generated_tokens_per_s=worker.generated_tokens_per_s,
        step_s=worker.step_s.mean,
    )
