"""What a router knows of open sessions."""

from msgspec.structs import replace

from penstock.core.types.requests import SessionAction, SessionControl
from penstock.router.policy.open_sessions import OpenSessions
from penstock.testing.engines.probe import make_request

OPEN = SessionControl(action=SessionAction.OPEN, ttl_s=20)
CLOSE = SessionControl(action=SessionAction.CLOSE)


def ask(session, control=None, tenant=""):
    return replace(make_request("r", [1]), session=session, session_control=control, tenant=tenant)


def test_a_session_stays_where_it_was_opened_until_it_is_closed():
    known = OpenSessions(10, 100)
    known.taken(ask("a"), 1, 0)
    assert known.worker_of(ask("a"), 0) is None
    known.taken(ask("a", OPEN), 1, 0)
    known.taken(ask("b", OPEN), 2, 0)
    assert [known.worker_of(ask(name), 5) for name in ("a", "b", "c", None)] == [1, 2, None, None]
    assert known.worker_of(ask("a", tenant="other"), 5) is None
    known.taken(ask("a", CLOSE), 1, 6)
    assert known.worker_of(ask("a"), 6) is None
    known.check()


def test_what_is_remembered_is_bounded_in_number_and_time():
    known = OpenSessions(2, 100)
    for second, name in enumerate("abc"):
        known.taken(ask(name, OPEN), 1, second)
    assert [known.worker_of(ask(name), 3) for name in "abc"] == [None, 1, 1]
    known.taken(ask("b"), 1, 50)
    known.check()
    assert [known.worker_of(ask(name), 120) for name in "bc"] == [1, None]
    assert len(known) == 1
