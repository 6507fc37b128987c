"""Steps from the workers that are there to those that are wanted."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.types.instances import Replica, ReplicaState, Role, RoleLimit, Scale
from penstock.planner.actor import make_plan

P, D = Role.PREFILL, Role.DECODE


def scale_of(*replicas, room=None):
    return Scale(
        sequence=0,
        revision=0,
        replicas=tuple(
            Replica(name=name, role=role, state=ReplicaState(state)) for name, role, state in replicas
        ),
        limits=tuple(RoleLimit(role=role, room=room) for role in (P, D)),
    )


states = st.sampled_from(["ready", "starting", "failed", "flipping", "draining"])
counts = st.integers(0, 5)


@given(st.lists(st.tuples(st.sampled_from([P, D]), states), max_size=10), counts, counts, st.booleans())
def test_a_plan_leads_to_its_target(workers, prefill, decode, is_rigid):
    scale = scale_of(*((f"w{number}", role, state) for number, (role, state) in enumerate(workers)))
    target = {P: prefill, D: decode}
    plan = make_plan(scale, target, rigid={(P, D), (D, P)} if is_rigid else ())
    have = {role: len(scale.of(role)) for role in target}
    roles = {replica.name: replica.role for replica in scale.replicas}
    for name, role in (*plan.flips, *plan.late_flips):
        have[roles[name]] -= 1
        have[role] += 1
    for role, count in plan.adds.items():
        have[role] += count
    leaving = (*plan.retires, *plan.late)
    flipped = {name for name, _ in (*plan.flips, *plan.late_flips)}
    assert len(set(leaving) | flipped) == len(leaving) + len(flipped)
    for name in leaving:
        have[roles[name]] -= 1
    for role, count in target.items():
        ready = {each.name for each in scale.of(role) if each.state is ReplicaState.READY}
        assert not count or not ready or ready - {name for name, _ in plan.flips}, "one still serves"
    flipping = {role: sum(r.state is ReplicaState.FLIPPING for r in scale.of(role)) for role in target}
    for role, count in target.items():
        assert count <= have[role] <= max(count, flipping[role])
