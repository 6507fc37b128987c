"""`penstock role`: has a worker of a running deployment change its role."""

import sys
from urllib.parse import quote

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.commands.admin import ask, base_of
from penstock.router.dispatch.role_changes import RoleChanged

_TIMEOUT_S = 660.0  # it may have to drain first


def change_role(url: str, worker: str, role: Role) -> RoleChanged:
    """Ask a frontend, and wait until the worker can be sent something in its new role.

    Raises:
        ConfigError: this is no URL.
        RequestError: there is no such worker, or it cannot become that; the text says why.
        Unavailable: nobody answers there.
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
    """Do it, and say what came of it in one line."""
    changed = change_role(url, worker, role)
    sys.stdout.write(
        f"{changed.worker}: {changed.role} now, was {changed.before}; took {changed.took_s:.2f} s\n"
    )
