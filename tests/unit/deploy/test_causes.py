from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.causes import cause_of


def test_a_lone_error_is_its_own_cause() -> None:
    error = ValueError("x")
    assert cause_of(error) is error
    assert cause_of(ExceptionGroup("g", [ExceptionGroup("h", [error])])) is error


def test_the_first_clear_error_speaks_for_a_group() -> None:
    clear = ConfigError("no weights")
    group = ExceptionGroup("g", [ValueError("x"), ExceptionGroup("h", [clear, Unavailable("later")])])
    assert cause_of(group) is clear


def test_several_unclear_errors_stay_together() -> None:
    group = ExceptionGroup("g", [ValueError("x"), KeyError("y")])
    assert cause_of(group) is group
