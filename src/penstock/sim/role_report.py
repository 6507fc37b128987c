"""A report's parts about roles: what the workers of each did, and what handing prompts over came to."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Role
from penstock.sim.crew import Crew
from penstock.sim.deployment import Deployment
from penstock.sim.simulate import Recording, Samples
from penstock.sim.spread import ratio, spread


def report_roles(recording: Recording, deployment: Deployment) -> dict[str, Any]:
    """Sum up by role; figures over time are None where no samples were taken."""
    return {crew.role.value: _report_role(recording, crew) for crew in deployment.crews}


def _report_role(recording: Recording, crew: Crew) -> dict[str, Any]:
    tally = recording.tallies[crew.role]
    return {
        "workers": crew.spec.replicas,
        "devices": crew.devices,
        "hardware": crew.hardware.name,
        "kv_tokens": crew.num_blocks * crew.block_size,
        "prefilled_tokens": tally.prefilled_tokens,
        "generated_tokens": tally.generated_tokens,
        "kv_hit_ratio": ratio(tally.prefix_hit_tokens, tally.prefix_hit_tokens + tally.prefilled_tokens),
        "preemptions": tally.preemptions,
        "received_bytes": tally.received_bytes,
        **_over_time(recording.samples, crew.role),
    }


def _over_time(samples: Samples | None, role: Role) -> dict[str, Any]:
    names = ("waiting_requests", "running_requests", "kv_use")
    if samples is None or not samples.at_s:
        return dict.fromkeys(names)
    columns = samples.columns_of(role)
    waiting, running, active, total = (
        samples.of(name)[:, columns]
        for name in ("waiting_requests", "running_requests", "active_blocks", "total_blocks")
    )
    return dict(zip(names, map(_mean_and_max, (waiting, running, active / total)), strict=True))


def _mean_and_max(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Of all workers at all times."""
    known = values[np.isfinite(values)]
    if not len(known):
        return {"mean": None, "max": None}
    return {"mean": float(known.mean()), "max": float(known.max())}


def report_hand_over(recording: Recording, deployment: Deployment) -> dict[str, Any] | None:
    """Sum up what was handed over; None where nothing can be."""
    if len(deployment.answering) == len(deployment.crews):
        return None
    second_s = np.asarray(recording.second_token_s) - np.asarray(recording.first_token_s)
    is_handed = np.isfinite(second_s)
    tallies = recording.tallies.values()
    failures: dict[str, int] = {}
    for tally in tallies:
        for code, times in tally.failures.items():
            failures[code] = failures.get(code, 0) + times
    return {
        "remote": int(is_handed.sum()),
        "local": len(second_s) - int(is_handed.sum()),
        "bytes": sum(tally.received_bytes for tally in tallies),
        "second_token_s": spread(second_s[is_handed]),
        "failures": dict(sorted(failures.items())),
        "expired": sum(tally.expired for tally in tallies),
        "refused": sum(tally.refused for tally in tallies),
    }
