"""One suspect at a time, in the order in which they came."""

from penstock.router.probation import Probation


def test_one_at_a_time_first_come_first_served() -> None:
    probation = Probation()
    woken: list[str] = []

    def enter(name: str) -> bool:
        return probation.enter(name, lambda: woken.append(name))

    assert enter("a")
    assert enter("a"), "who has the place has it"
    assert not enter("b")
    assert not enter("c")
    probation.leave("a")
    assert woken == ["b"]
    assert not enter("c"), "b came before"
    assert enter("b")
    probation.leave("b")
    probation.leave("b")
    assert set(woken) == {"b", "c"}
    assert enter("c")
    probation.check()


def test_who_waits_no_longer_holds_nobody_up() -> None:
    probation = Probation()
    woken: list[str] = []
    assert probation.enter("a", lambda: woken.append("a"))
    assert not probation.enter("b", lambda: woken.append("b"))
    assert not probation.enter("c", lambda: woken.append("c"))
    probation.leave("b")
    assert not woken
    probation.leave("a")
    assert woken == ["c"]
    assert probation.enter("c", lambda: None)
    probation.leave("stranger")
    probation.check()
