"""The report of a process that an error ends."""

from penstock.core.errors import ConfigError, PenstockError, Unavailable, WrongServerError
from penstock.deploy.causes import cause_of
from penstock.deploy.messages import Failed


def report_of(error: BaseException) -> Failed:
    """Make the report of a process that an error ends."""
    cause = cause_of(error)
    if not isinstance(cause, PenstockError):
        return Failed(message=f"{type(cause).__name__}: {cause}")
    return Failed(
        message=cause.message,
        config=isinstance(cause, ConfigError),
        outside=isinstance(cause, (Unavailable, WrongServerError)),
    )
