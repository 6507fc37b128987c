from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.messages import Failed
from penstock.deploy.processes.report import report_of


def test_a_report_says_whether_a_restart_may_help() -> None:
    assert report_of(ExceptionGroup("g", [ConfigError("no weights")])) == Failed(
        message="no weights", config=True
    )
    assert report_of(Unavailable("later")) == Failed(message="later", outside=True)
    assert report_of(KeyError("x")) == Failed(message="KeyError: 'x'")
