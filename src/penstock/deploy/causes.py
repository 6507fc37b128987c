"""What people should read of an error that came through task groups."""

from penstock.core.errors import PenstockError


def cause_of(error: BaseException) -> BaseException:
    """Take the first clear error out of nested groups; where there is none, a lone error, else the group."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(inner) for inner in error.exceptions]
    clear = next((cause for cause in causes if isinstance(cause, PenstockError)), None)
    return clear or (causes[0] if len(causes) == 1 else error)
