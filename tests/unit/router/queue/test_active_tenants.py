"""Whether there are several tenants."""

from penstock.router.queue.active_tenants import LATELY_S, ActiveTenants


def test_one_tenant_is_alone_and_two_are_several_for_a_while():
    active = ActiveTenants()
    assert not active.are_several(0.0)
    for second in range(5):
        active.seen("a", float(second))
        assert not active.are_several(float(second))
    active.seen("b", 5.0)
    assert active.are_several(5.0)
    assert active.are_several(4.0 + LATELY_S)
    assert not active.are_several(4.1 + LATELY_S), "a came last at 4 s"
    active.seen("b", 9e3)
    assert not active.are_several(9e3)
    active.seen("", 9001.0)
    assert active.are_several(9001.0)
