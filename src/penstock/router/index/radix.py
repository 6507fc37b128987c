"""The prefix index: which workers hold which prefixes, in which tier.

The native tree where it is installed, else the Python reference.
"""

from typing import TYPE_CHECKING

from penstock.core.native import native
from penstock.router.index.calls import HeldBlocks, PrefixMatch, RadixCalls, RadixStats
from penstock.router.index.reference import RadixTreePython

__all__ = ["HeldBlocks", "PrefixMatch", "RadixStats", "RadixTree", "RadixTreePython"]

if TYPE_CHECKING or native is None:
    RadixTree = RadixTreePython
else:

    class RadixTree(RadixCalls, native.RadixTree):
        """Does what its reference says."""

        __doc__ = RadixTreePython.__doc__
