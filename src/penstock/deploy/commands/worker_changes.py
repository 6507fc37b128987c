"""`penstock role`, `penstock sleep` and `penstock wake`: changes of a running worker."""

import sys
from typing import TypeVar
from urllib.parse import quote

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.commands.admin import ask, base_of
from penstock.router.dispatch.worker_changes import RoleChanged, StateChanged

_TIMEOUT_S = 660.0  # the worker may have to drain first
_Outcome = TypeVar("_Outcome", RoleChanged, StateChanged)


def change_role(url: str, worker: str, role: Role) -> RoleChanged:
    """Ask a frontend for the change, and wait until the worker takes requests in its new role.

    Raises:
        ConfigError: `url` is no URL.
        RequestError: the worker does not exist, or cannot have that role.
        Unavailable: no server answers at `url`.
    """
    return _ask(url, worker, "role", {"role": role}, RoleChanged)


def sleep(url: str, worker: str, level: int) -> StateChanged:
    """Ask a frontend to have a worker sleep, and wait until it does; raises as `change_role`."""
    return _ask(url, worker, "sleep", {"level": level}, StateChanged)


def wake_up(url: str, worker: str) -> StateChanged:
    """Ask a frontend to wake a worker, and wait until it takes requests; raises as `change_role`."""
    return _ask(url, worker, "wake", {}, StateChanged)


def run_role(url: str, worker: str, role: Role) -> None:
    """Change the role and print the result."""
    changed = change_role(url, worker, role)
    sys.stdout.write(
        f"{changed.worker}: {changed.role} now, was {changed.before}; took {changed.took_s:.2f} s\n"
    )


def run_sleep(url: str, worker: str, level: int) -> None:
    """Have the worker sleep and print the result."""
    _print(sleep(url, worker, level))


def run_wake(url: str, worker: str) -> None:
    """Wake the worker and print the result."""
    _print(wake_up(url, worker))


def _print(changed: StateChanged) -> None:
    sys.stdout.write(f"{changed.worker}: {changed.state} now; took {changed.took_s:.2f} s\n")


def _ask(url: str, worker: str, what: str, body: dict[str, object], kind: type[_Outcome]) -> _Outcome:
    path = f"/admin/workers/{quote(worker, safe='')}/{what}"
    answer = ask(base_of(url), path, body=msgspec.json.encode(body), timeout_s=_TIMEOUT_S)
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--url: {url}: the answer is not Penstock's, or another version's: {error}"
        ) from error
