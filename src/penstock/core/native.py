"""The native module, or None where the package was installed with PENSTOCK_NATIVE=OFF.

Every native function has a Python reference that gives equal results, so `native is None` only costs time. The simulator's
scheduler has the exact engine instead, which runs every step. A native module that exists but cannot be loaded is an error: a
silent fallback would only be slow.
"""

from types import ModuleType

from penstock.core.log import get_logger

native: ModuleType | None
try:
    from penstock import _native as native
except ImportError as error:
    if error.name != "penstock":  # the module exists, but cannot be loaded
        raise
    native = None


def warn_if_disabled() -> None:
    """Warn that everything runs in Python; commands call it once, at start."""
    if native is None:
        get_logger().warning(
            "native_disabled",
            effect="block hashes, block pool, prefix index and transfers run in Python, two to a hundred times slower",
            fix="install g++ and Python's headers, then reinstall without PENSTOCK_NATIVE=OFF",
        )
