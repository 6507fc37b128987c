"""Changes that every scaling connector refuses, by the workers as they are."""

import pytest

from penstock.core.errors import RequestError
from penstock.core.types.instances import Replica, ReplicaState, Role, RoleLimit, Scale
from penstock.core.types.scaling_rules import check_add, check_flip, check_retire

P, D = Role.PREFILL, Role.DECODE
READY, STARTING, FLIPPING, DRAINING = (
    ReplicaState.READY,
    ReplicaState.STARTING,
    ReplicaState.FLIPPING,
    ReplicaState.DRAINING,
)


def scale(held="", **workers):
    replicas = tuple(Replica(name=name, role=role, state=state) for name, (role, state) in workers.items())
    limits = (RoleLimit(role=P, room=1, why="one GPU is free"), RoleLimit(role=D))
    return Scale(sequence=9, revision=3, changed_by="a person", replicas=replicas, limits=limits, held=held)


def test_a_role_gets_no_more_workers_than_find_room():
    check_add(scale(), P, 1, revision=3)
    check_add(scale(), D, 4096)
    for role, count, status, text in (
        (P, 2, 409, "2 workers more cannot be added, 1 can: one GPU is free"),
        (P, 0, 400, "must be >= 1, got 0"),
        (Role.AGGREGATED, 1, 404, "is not of this deployment, which has prefill, decode"),
    ):
        with pytest.raises(RequestError, match=text) as caught:
            check_add(scale(), role, count)
        assert caught.value.http_status == status


@pytest.mark.parametrize(
    ("workers", "names", "text"),
    [
        ({"d1": (D, READY)}, ["d1"], "d1 is the last worker that answers requests; add another first"),
        ({"d1": (D, STARTING)}, ["d1"], "d1 is the last worker that answers requests; add another first"),
        ({"d1": (D, READY), "p1": (P, READY)}, ["d1"], "last worker that answers"),
        ({"d1": (D, READY), "d2": (D, DRAINING)}, ["d1"], "last worker that answers"),
        ({"d1": (D, READY), "d2": (D, STARTING)}, ["d1"], "wait until one of d2 is ready"),
        ({"d1": (D, READY), "d2": (D, FLIPPING)}, ["d1"], "wait until one of d2 is ready"),
        ({"d1": (D, READY), "d2": (D, READY)}, ["d1", "d2"], "d1 is the last worker"),
        ({"d1": (D, READY), "d2": (D, READY)}, ["d1", "d1"], ""),
        ({"d1": (D, READY), "d2": (D, STARTING)}, ["d2"], ""),
        ({"d1": (D, STARTING), "d2": (D, STARTING)}, ["d2"], ""),
        ({"d1": (D, READY), "p1": (P, READY)}, ["p1"], ""),
        ({"d1": (D, READY), "d2": (D, DRAINING)}, ["d2"], "d2 drains already"),
        ({"d1": (D, READY)}, ["d9"], "there is no worker 'd9' here; known: d1"),
    ],
)
def test_workers_leave_only_if_requests_are_answered_without_them(workers, names, text):
    now = scale(**workers)
    if not text:
        assert [replica.name for replica in check_retire(now, names)] == list(dict.fromkeys(names))
        return
    with pytest.raises(RequestError, match=text):
        check_retire(now, names)


def test_workers_elsewhere_answer_too():
    now = scale(d1=(D, READY))
    check_retire(now, ["d1"], elsewhere={D})
    check_flip(now, "d1", P, elsewhere={D})
    with pytest.raises(RequestError, match="last worker that answers"):
        check_retire(now, ["d1"], elsewhere={P})


@pytest.mark.parametrize(
    ("name", "role", "text"),
    [
        ("d1", P, "d1 is the last worker that answers requests"),
        ("d1", D, "d1 is decode already"),
        ("d2", P, "d2 is not ready: starting; choose another worker"),
        ("d3", P, "d3 is becoming decode already; wait until it has"),
        ("d9", P, "there is no worker 'd9'"),
    ],
)
def test_only_a_ready_worker_that_can_be_spared_changes_its_role(name, role, text):
    now = scale(d1=(D, READY), d2=(D, STARTING), d3=(D, FLIPPING), p1=(P, READY))
    assert check_flip(now, "p1", D).name == "p1"
    with pytest.raises(RequestError, match=text):
        check_flip(now, name, role)


def test_a_change_on_an_old_revision_and_one_of_held_workers_are_refused():
    workers = {"d1": (D, READY), "d2": (D, READY)}
    for change in (
        lambda now, revision: check_add(now, D, 1, revision=revision),
        lambda now, revision: check_retire(now, ["d1"], revision=revision),
        lambda now, revision: check_flip(now, "d1", P, revision=revision),
    ):
        change(scale(**workers), 3)
        with pytest.raises(RequestError, match="a person has scaled meanwhile") as caught:
            change(scale(**workers), 2)
        assert caught.value.http_status == 409
    check_add(scale(held="a host is lost", **workers), D, 1)
    for refused in (lambda now: check_retire(now, ["d1"]), lambda now: check_flip(now, "d1", P)):
        with pytest.raises(RequestError, match="a host is lost"):
            refused(scale(held="a host is lost", **workers))
