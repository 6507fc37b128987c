"""Conditions by parts and pods."""

import pytest

from penstock.deploy.operator.health import PartHealth, Problem, conditions_of, part_of, problem_of


def workload(*, generation=1, observed=1, **status):
    return {
        "metadata": {"generation": generation}, "spec": {"replicas": 2},
        "status": {"observedGeneration": observed, **status},
    }  # fmt: skip


def current(name, wanted, ready=None):
    ready = wanted if ready is None else ready
    return PartHealth(name, wanted, ready=ready, total=wanted, is_current=True)


@pytest.mark.parametrize(
    ("body", "is_current"),
    [
        (workload(replicas=2, updatedReplicas=2, readyReplicas=2), True),
        (workload(replicas=2, updatedReplicas=1), False),
        (workload(generation=2, replicas=2, updatedReplicas=2), False),
        ({"metadata": {"generation": 1}, "spec": {"replicas": 0}, "status": {"observedGeneration": 1}}, True),
        ({"metadata": {"generation": 1}, "spec": {"replicas": 1}}, False),
    ],
)
def test_a_part_is_current_when_all_its_pods_are(body, is_current):
    assert part_of("decode", [body], []).is_current is is_current


def test_a_part_that_is_not_there_wants_nothing():
    part = part_of("decode", [], [])
    assert (part.wanted, part.is_current) == (0, False)


@pytest.mark.parametrize(
    ("parts", "ready", "reason"),
    [
        ([current("frontend", 1), current("aggregated", 1)], True, "Serving"),
        ([current("frontend", 1), current("prefill", 1), current("decode", 1)], True, "Serving"),
        ([current("frontend", 1), current("prefill", 1), current("decode", 2, 0)], False, "NoWorkers"),
        ([current("frontend", 1), current("aggregated", 1), current("decode", 1, 0)], True, "Serving"),
        ([current("frontend", 1, 0), current("aggregated", 1)], False, "NoFrontend"),
        ([], False, "NoFrontend"),
    ],
)
def test_ready_is_that_a_request_would_be_answered(parts, ready, reason):
    assert conditions_of(parts)["Ready"][:2] == (ready, reason)


def test_the_problem_with_the_plainest_mend_comes_first():
    part = current("decode", 3, 0)
    part.problems = [
        Problem("c", "Unschedulable", "no node"), Problem("b", "CrashLoop", "ended"), Problem("a", "ImagePullFailed", "image"),
    ]  # fmt: skip
    is_degraded, reason, message = conditions_of([part])["Degraded"]
    assert is_degraded
    assert reason == "ImagePullFailed"
    assert message == "a: image; b: ended; c: no node"


@pytest.mark.parametrize(
    "status", [{}, {"conditions": None}, {"containerStatuses": [{"state": None}]}, {"phase": "Pending"}]
)
def test_a_pod_that_only_starts_has_no_problem(status):
    assert problem_of({"metadata": {"name": "a"}, "status": status}) is None


def test_a_crash_says_the_last_line_that_its_container_left():
    container = {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 3,
        "lastState": {"terminated": {"exitCode": 2, "reason": "Error", "message": "starting\npenstock: no model\n"}},
    }  # fmt: skip
    problem = problem_of({"metadata": {"name": "a"}, "status": {"containerStatuses": [container]}})
    assert problem is not None
    assert problem.text.startswith("ended 3 times, last with exit code 2: penstock: no model;")
