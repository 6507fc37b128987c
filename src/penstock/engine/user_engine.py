"""A user's engine: a function or class of theirs that makes it, named as `package.module:make`."""

import sys
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec

from penstock.core.config import nearest
from penstock.core.errors import ConfigError, PenstockError
from penstock.engine.launch import EngineLaunch
from penstock.engine.launch_host import LaunchHost
from penstock.engine.spec import EngineSpec
from penstock.seams import Engine

_FORM = "`package.module:make`, importable by every worker (PYTHONPATH)"
_UNTOLD = ("schedulers",)
_MEMBERS = ("start", "submit", "abort", "steps", "load", "close")


def check_user_engine_name(name: str) -> None:
    """Check a user engine's name without importing its code.

    Raises:
        ConfigError: it is not of the form `package.module:make`, or there is no such package.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"engine {name!r}: expected {_FORM}")
    package = module_name.split(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        raise ConfigError(f"engine {name!r}: there is no module {package!r}; expected {_FORM}")


def user_engine_launch(name: str, spec: EngineSpec, host: LaunchHost) -> EngineLaunch:  # noqa: ARG001
    """Describe a user's engine by the plain fields of the `EngineSpec` that it gets. Its code is not imported."""
    plain = {field.name: getattr(spec, field.name) for field in fields(spec)}
    kinds = (str, int, dict, tuple)
    return EngineLaunch(
        call=f"{name}(EngineSpec)",
        arguments={
            key: value for key, value in plain.items() if isinstance(value, kinds) and key not in _UNTOLD
        },
    )


def make_user_engine(name: str, spec: EngineSpec) -> Engine:
    """Import a user's engine and make it: `make(spec)` returns a `penstock.seams.Engine`.

    Raises:
        ConfigError: its code cannot be imported, it raises something else than a PenstockError, or what it returns is no engine.
    """
    check_user_engine_name(name)
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"engine {name!r}: {module_name!r} cannot be imported: {type(error).__name__}: {error}; expected {_FORM}"
        ) from error
    make = getattr(module, attribute, None)
    if not callable(make):
        callables = [
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        raise ConfigError(
            f"engine {name!r}: {module_name} has no {attribute!r}{nearest(attribute, callables)}"
        )
    try:
        engine: Engine = make(spec)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"engine {name!r}: {attribute}(spec) raised {type(error).__name__}: {error}; expected a penstock.seams.Engine"
        ) from error
    lacking = [member for member in _MEMBERS if not callable(getattr(engine, member, None))]
    if lacking:
        raise ConfigError(
            f"engine {name!r}: {attribute}(spec) returned a {type(engine).__name__} without {', '.join(lacking)};"
            " expected a penstock.seams.Engine"
        )
    return engine
