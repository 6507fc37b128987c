"""Checks before a start that the planner can scale a graph's roles, within its budget."""

from penstock.core.config import wrong
from penstock.core.errors import ConfigError
from penstock.graph.capacities import cost_of, unscalable
from penstock.graph.role import Roles
from penstock.planner.config import PlannerConfig, kinds_of


def check_planner(planner: PlannerConfig, roles: Roles) -> None:
    """Check bounds and budget against the roles.

    Raises:
        PydanticCustomError: the planner cannot scale a role, or may not have as many workers as there are.
    """
    present = roles.present()
    try:
        planner.check_roles(present.keys())
    except ConfigError as error:
        raise wrong(error.message) from error
    for role, spec in present.items():
        if why := unscalable(spec):
            raise wrong(f"planner: roles.{role}: {why}; leave planner out")
        _, most = planner.bounds(role)
        if spec.replicas > most:
            raise wrong(
                f"roles.{role}.replicas is {spec.replicas}, planner.max_workers {most} for {role}; lower one or raise the other"
            )
    if planner.budget is None:
        return
    unit, amount = next(iter(planner.budget.model_dump(exclude_none=True).items()))
    for kind in kinds_of(present.keys()):
        needed = sum(planner.bounds(role)[0] * cost_of(present[role], planner.budget) for role in kind)
        if amount < needed:
            each = " and ".join(f"{planner.bounds(role)[0]} {role}" for role in sorted(kind))
            raise wrong(
                f"planner.budget.{unit} is {amount:g}, and {each} cost {needed:g}; raise it, or lower min_workers"
            )
