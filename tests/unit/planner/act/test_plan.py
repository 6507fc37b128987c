"""Steps from the workers that are there to those that are wanted."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.types.instances import Role
from penstock.core.types.scaling import Replica, ReplicaState, RoleLimit, Scale
from penstock.planner.act.plan import Plan, make_plan

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


PAIR = scale_of(("p1", P, "ready"), ("d1", D, "ready"), ("d2", D, "ready"), ("d3", D, "ready"))


def test_flips_come_before_starts_and_take_the_least_loaded():
    plan = make_plan(PAIR, {P: 3, D: 2}, load={"d1": 5.0, "d2": 1.0, "d3": 3.0})
    assert plan == Plan(flips=(("d2", P),), adds={P: 1})


def test_the_last_ready_worker_of_a_role_flips_once_another_one_is_ready():
    scale = scale_of(("p1", P, "ready"), ("p2", P, "starting"), ("d1", D, "ready"))
    assert make_plan(scale, {P: 1, D: 2}) == Plan(late_flips=(("p1", D),))
    assert make_plan(scale, {P: 0, D: 3}) == Plan(flips=(("p1", D),), adds={D: 1}, retires=("p2",))
    scale = scale_of(("p1", P, "ready"), ("p2", P, "ready"), ("d1", D, "ready"))
    assert make_plan(scale, {P: 1, D: 2}) == Plan(flips=(("p1", D),))


def test_roles_that_do_not_flip_are_started_first_and_retired_later():
    plan = make_plan(PAIR, {P: 2, D: 2}, rigid={(D, P)})
    assert plan == Plan(adds={P: 1}, late=("d1",))
    full = scale_of(("p1", P, "ready"), ("d1", D, "ready"), ("d2", D, "ready"), room=0)
    plan = make_plan(full, {P: 2, D: 1}, rigid={(D, P)})
    assert plan == Plan(adds={P: 1}, retires=("d1",)), "no room before one leaves"


def test_failed_and_starting_workers_are_retired_before_those_that_serve():
    scale = scale_of(("d1", D, "ready"), ("d2", D, "starting"), ("d3", D, "failed"), ("d4", D, "draining"))
    assert make_plan(scale, {D: 1}) == Plan(retires=("d3", "d2"))
    assert make_plan(scale, {D: 3}).is_empty, "what starts counts, what drains does not"


def test_roles_that_wait_start_none_and_others_stay_meanwhile():
    assert make_plan(PAIR, {P: 3, D: 1}, rigid={(D, P)}, waiting=[P]) == Plan(
        later_adds={P: 2}, late=("d1", "d2")
    )
    assert make_plan(PAIR, {P: 3, D: 2}, waiting=[P]) == Plan(flips=(("d1", P),), later_adds={P: 1})


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


def test_overdue_workers_of_roles_that_are_not_named_stay():
    scale = scale_of(("p1", P, "starting"), ("d1", D, "ready"))
    assert make_plan(scale, {D: 1}, overdue=("p1",)) == Plan()
