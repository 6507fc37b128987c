"""The native module, or None where the package was installed with PENSTOCK_NATIVE=OFF.

Every native function has a Python reference that gives equal results, so `native is None` only costs time. A module
that is there but cannot be loaded is an error and not a reason to go on slowly.
"""

from types import ModuleType

from penstock.core.log import get_logger

native: ModuleType | None
try:
    from penstock import _native as native
except ImportError as error:
    if error.name != "penstock":  # found, but not loadable
        raise
    native = None


def warn_if_disabled() -> None:
    """Say that all runs in Python; a command calls it once, at its start."""
    if native is None:
        get_logger().warning(
            "native_disabled",
            effect="block hashes, block pool, prefix index and transfers run in Python, two to a hundred times slower",
            fix="install g++ and Python's headers, then reinstall without PENSTOCK_NATIVE=OFF",
        )
