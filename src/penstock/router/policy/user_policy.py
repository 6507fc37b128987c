"""User policies: found by entry point, or as `package.module:Class`."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import cast

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.seams import RoutingPolicy

ENTRY_POINT_GROUP = "penstock.policies"
"""Where an installed package lists its policies."""


def check_user_policy_name(name: str, known: list[str]) -> None:
    """Check a user policy's name without importing its code.

    Args:
        name: as for `find_user_policy`.
        known: names of built-in policies, for the hint in errors.

    Raises:
        ConfigError: neither an installed policy nor of the form `package.module:Class`.
    """
    if ":" not in name:
        _installed(name, known)
        return
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"policy {name!r}: expected `package.module:Class`")
    package = module_name.split(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        raise ConfigError(
            f"policy {name!r}: there is no module {package!r}; it must be importable by every process that routes (PYTHONPATH)"
        )


def find_user_policy(name: str, known: list[str]) -> Callable[[], RoutingPolicy]:
    """Import a user policy: a class, or any callable without arguments that makes one.

    Args:
        name: `module:Class`, or the name of an entry point of the group `penstock.policies`.
        known: names of built-in policies, for the hint in errors.

    Raises:
        ConfigError: there is no such policy, or its code cannot be imported.
    """
    if ":" in name:
        entry = EntryPoint(name=name, value=name, group=ENTRY_POINT_GROUP)
    else:
        entry = _installed(name, known)
    module_name, _, attribute = entry.value.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"policy {name!r}: {module_name!r} cannot be imported: {error}; expected `package.module:Class`,"
            " importable by every process that routes (PYTHONPATH)"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(f"policy {name!r}: {module_name} has no {attribute!r}{nearest(attribute, classes)}")
    return lambda: _make(name, cast("Callable[[], RoutingPolicy]", found))


def _installed(name: str, known: list[str]) -> EntryPoint:
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        raise ConfigError(f"policy {name!r} is unknown{nearest(name, [*known, *installed])}")
    return installed[name]


def _make(name: str, make: Callable[[], RoutingPolicy]) -> RoutingPolicy:
    try:
        policy = make()
    except Exception as error:
        raise ConfigError(f"policy {name!r}: it could not be made without arguments: {error}") from error
    lacking = [member for member in ("name", "costs") if not hasattr(policy, member)]
    if lacking:
        raise ConfigError(
            f"policy {name!r}: a {type(policy).__name__} has no {' and no '.join(lacking)}; expected a"
            " penstock.seams.RoutingPolicy"
        )
    return policy
