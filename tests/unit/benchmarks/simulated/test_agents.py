"""The workload of agents, and one of its simulations."""

import pytest

from benchmarks.simulated.agents import largest_rate, sessions_of


def test_agents_and_chats_are_the_same_whether_or_not_sessions_are_opened():
    plain = sessions_of(agents=5, rate_per_s=0.2, opens=False, seed=3)
    opened = sessions_of(agents=5, rate_per_s=0.2, opens=True, seed=3)
    assert [(each.at_s, each.turns, each.tenant) for each in plain] == [
        (each.at_s, each.turns, each.tenant) for each in opened
    ]
    assert {each.opens for each in plain} == {False}
    assert {each.tenant for each in opened if each.opens} == {"agents"}
    agents = [each for each in plain if each.tenant == "agents"]
    assert [len(each.turns) for each in agents] == [8] * 5
    assert all(2 <= turn.think_s <= 60 for each in agents for turn in each.turns[1:])
    assert len(plain) > 3 * len(agents)
    for each in agents:
        lengths = [turn.input_tokens for turn in each.turns]
        assert lengths == sorted(lengths)


def test_the_largest_rate_lies_where_the_target_is_reached():
    rates = (0.1, 0.2, 0.3)
    assert largest_rate(rates, [0.4, 0.8, 1.2]) == pytest.approx(0.25)
    assert largest_rate(rates, [0.4, 0.8, 1.0]) == 0.3
    assert largest_rate(rates, [1.1, 1.2, 1.3]) == 0
    assert largest_rate(rates, [0.5, 1.5, 0.9]) == pytest.approx(0.15), "a later one within it may be luck"
