"""The one error to show of an exception group."""

from penstock.core.errors import PenstockError


def cause_of(error: BaseException) -> BaseException:
    """Give the first PenstockError in nested groups, else a sole other error, else the group."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(inner) for inner in error.exceptions]
    clear = next((cause for cause in causes if isinstance(cause, PenstockError)), None)
    return clear or (causes[0] if len(causes) == 1 else error)
