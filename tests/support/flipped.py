"""A bit of memory that is not what it was."""

import ctypes


def flip(address: int) -> None:
    """Flip the lowest bit of the byte at an address."""
    byte = ctypes.c_uint8.from_address(int(address))
    byte.value ^= 1
