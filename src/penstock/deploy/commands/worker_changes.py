"""`penstock role`, `penstock sleep` and `penstock wake`: changes of a running worker."""

import sys
from typing import TypeVar
from urllib.parse import quote

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.commands.admin import ask
from penstock.deploy.control.frontend_address import FrontendAddress
from penstock.router.dispatch.worker_changes import RoleChanged, StateChanged

_TIMEOUT_S = 660.0  # the worker may have to drain first
_Outcome = TypeVar("_Outcome", RoleChanged, StateChanged)


def change_role(server: FrontendAddress, worker: str, role: Role) -> RoleChanged:
    """Ask a frontend for the change, and wait until the worker takes requests in its new role.

    Raises:
        ConfigError: the answer is of another version.
        RequestError: the worker does not exist, or cannot have that role.
        Unavailable: no server answers.
    """
    return _ask(server, worker, "role", {"role": role}, RoleChanged)


def sleep(server: FrontendAddress, worker: str, level: int) -> StateChanged:
    """Ask a frontend to have a worker sleep, and wait until it does; raises as `change_role`."""
    return _ask(server, worker, "sleep", {"level": level}, StateChanged)


def wake_up(server: FrontendAddress, worker: str) -> StateChanged:
    """Ask a frontend to wake a worker, and wait until it takes requests; raises as `change_role`."""
    return _ask(server, worker, "wake", {}, StateChanged)


def run_role(server: FrontendAddress, worker: str, role: Role) -> None:
    """Change the role and print the result."""
    changed = change_role(server, worker, role)
    sys.stdout.write(
        f"{changed.worker}: {changed.role} now, was {changed.before}; took {changed.took_s:.2f} s\n"
    )


def run_sleep(server: FrontendAddress, worker: str, level: int) -> None:
    """Have the worker sleep and print the result."""
    _print(sleep(server, worker, level))


def run_wake(server: FrontendAddress, worker: str) -> None:
    """Wake the worker and print the result."""
    _print(wake_up(server, worker))


def _print(changed: StateChanged) -> None:
    sys.stdout.write(f"{changed.worker}: {changed.state} now; took {changed.took_s:.2f} s\n")


def _ask(
    server: FrontendAddress, worker: str, what: str, body: dict[str, object], kind: type[_Outcome]
) -> _Outcome:
    path = f"/admin/workers/{quote(worker, safe='')}/{what}"
    answer = ask(server, path, body=msgspec.json.encode(body), timeout_s=_TIMEOUT_S)
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{server}: the answer is not Penstock's, or another version's: {error}") from error
