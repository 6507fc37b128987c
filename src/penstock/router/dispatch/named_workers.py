"""Workers by the names that operators know."""

from penstock.core.errors import RequestError, Unavailable
from penstock.router.fleet.fleet import Fleet
from penstock.router.workers.member import FleetMember
from penstock.seams import Connection

_NAMED_MAX = 16


def find_worker(fleet: Fleet, name: str) -> FleetMember:
    """Find the worker of this name; of several, as during a restart, the connected one. Any rank stands for its worker.

    Raises:
        RequestError: there is none (404), a rank is named alone, or several workers have this name (409).
    """
    listed = [member for member in fleet.slots.now() if member is not None and member.listed]
    named = [member for member in listed if member.instance.worker == name]
    found = [member for member in named if member.connection is not None] or named
    if not found:
        ranks = [member.instance for member in listed if member.instance.name == name]
        if ranks:
            raise RequestError(
                f"{name} is a data-parallel rank of worker {ranks[0].worker}, which changes as a whole; name {ranks[0].worker}",
                http_status=409,
                param="worker",
            )
        names = sorted({member.instance.worker for member in listed})
        known = ", ".join(names[:_NAMED_MAX]) + (" ..." if len(names) > _NAMED_MAX else "")
        raise RequestError(
            f"there is no worker {name[:100]!r}; known: {known or 'none'}",
            http_status=404,
            param="worker",
        )
    registered = {member.instance.registration for member in found}
    if len(registered) > 1:
        ids = ", ".join(map(str, sorted(registered)))
        raise RequestError(
            f"{len(registered)} workers are called {name} ({ids}); give each a name of its own",
            http_status=409,
        )
    return found[0]


def connection_of(member: FleetMember) -> Connection:
    """Give the connection to a worker.

    Raises:
        Unavailable: there is none.
    """
    if member.connection is None:
        why = "" if member.problem is None else f": {member.problem.message}"
        raise Unavailable(f"worker {member.instance.name} cannot be reached{why}; try again when it is back")
    return member.connection
