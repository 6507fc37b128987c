"""`penstock role`: changes the role of a running worker."""

import sys
from urllib.parse import quote

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.commands.admin import ask, base_of
from penstock.router.dispatch.role_changes import RoleChanged

_TIMEOUT_S = 660.0  # the worker may have to drain first


def change_role(url: str, worker: str, role: Role) -> RoleChanged:
    """Ask a frontend for the change, and wait until the worker takes requests in its new role.

    Raises:
        ConfigError: `url` is no URL.
        RequestError: the worker does not exist, or cannot have that role.
        Unavailable: no server answers at `url`.
    """
    path = f"/admin/workers/{quote(worker, safe='')}/role"
    answer = ask(base_of(url), path, body=msgspec.json.encode({"role": role}), timeout_s=_TIMEOUT_S)
    try:
        return msgspec.json.decode(answer, type=RoleChanged)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--url: {url}: the answer is not Penstock's, or another version's: {error}"
        ) from error


def run_role(url: str, worker: str, role: Role) -> None:
    """Change the role and print the result."""
    changed = change_role(url, worker, role)
    sys.stdout.write(
        f"{changed.worker}: {changed.role} now, was {changed.before}; took {changed.took_s:.2f} s\n"
    )
