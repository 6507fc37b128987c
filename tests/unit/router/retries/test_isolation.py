"""One suspect at a time, in the order in which they came."""

from penstock.router.retries.isolation import PoisonIsolation


def test_one_at_a_time_first_come_first_served() -> None:
    isolation = PoisonIsolation()
    woken: list[str] = []

    def enter(name: str) -> bool:
        return isolation.enter(name, lambda: woken.append(name))

    assert enter("a")
    assert enter("a"), "who has the place has it"
    assert not enter("b")
    assert not enter("c")
    isolation.leave("a")
    assert woken == ["b"]
    assert not enter("c"), "b came before"
    assert enter("b")
    isolation.leave("b")
    isolation.leave("b")
    assert set(woken) == {"b", "c"}
    assert enter("c")
    isolation.check()


def test_who_waits_no_longer_holds_nobody_up() -> None:
    isolation = PoisonIsolation()
    woken: list[str] = []
    assert isolation.enter("a", lambda: woken.append("a"))
    assert not isolation.enter("b", lambda: woken.append("b"))
    assert not isolation.enter("c", lambda: woken.append("c"))
    isolation.leave("b")
    assert not woken
    isolation.leave("a")
    assert woken == ["c"]
    assert isolation.enter("c", lambda: None)
    isolation.leave("stranger")
    isolation.check()
