"""Report sections per role, and of KV transfers between roles."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.instances import Role
from penstock.sim.deployment import Deployment
from penstock.sim.report.percentiles import percentiles, ratio
from penstock.sim.role_group import RoleGroup
from penstock.sim.simulate import Recording, Samples


def report_roles(recording: Recording, deployment: Deployment) -> dict[str, Any]:
    """Make the section of each role; values over time are None without samples."""
    return {
        role_group.role.value: _report_role(recording, role_group) for role_group in deployment.role_groups
    }


def _report_role(recording: Recording, role_group: RoleGroup) -> dict[str, Any]:
    counters = recording.counters[role_group.role]
    return {
        "workers": role_group.spec.replicas,
        "devices": role_group.devices,
        "hardware": role_group.hardware.name,
        "kv_tokens": role_group.num_blocks * role_group.block_size,
        "prefilled_tokens": counters.prefilled_tokens,
        "generated_tokens": counters.generated_tokens,
        "kv_hit_ratio": ratio(
            counters.prefix_hit_tokens, counters.prefix_hit_tokens + counters.prefilled_tokens
        ),
        "preemptions": counters.preemptions,
        "received_bytes": counters.received_bytes,
        **_over_time(recording.samples, role_group.role),
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
    """Give mean and maximum over all workers and times."""
    known = values[np.isfinite(values)]
    if not len(known):
        return {"mean": None, "max": None}
    return {"mean": float(known.mean()), "max": float(known.max())}


def report_kv_transfer(recording: Recording, deployment: Deployment) -> dict[str, Any] | None:
    """Make the section of KV transfers; None without prefill workers."""
    if len(deployment.decoding) == len(deployment.role_groups):
        return None
    second_s = np.asarray(recording.second_token_s) - np.asarray(recording.first_token_s)
    is_remote = np.isfinite(second_s)
    by_role = recording.counters.values()
    failures: dict[str, int] = {}
    for counters in by_role:
        for code, times in counters.failures.items():
            failures[code] = failures.get(code, 0) + times
    return {
        "remote": int(is_remote.sum()),
        "local": len(second_s) - int(is_remote.sum()),
        "bytes": sum(counters.received_bytes for counters in by_role),
        "second_token_s": percentiles(second_s[is_remote]),
        "failures": dict(sorted(failures.items())),
        "expired": sum(counters.expired for counters in by_role),
        "refused": sum(counters.refused for counters in by_role),
    }
