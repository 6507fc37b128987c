"""The capacity of a KV tier, as a configuration writes it."""

import re
from typing import Annotated

import pydantic

from penstock.core.errors import ConfigError

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_MULTIPLE_MAX = 10_000
"""A tier has at most so many times the blocks of the device."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(x|[KMGT]i?B|B)?")


class TierSize:
    """A tier's capacity: bytes, or a multiple of the device's blocks."""

    def __init__(self, number: float, unit: str) -> None:
        self.number = number
        self.unit = unit

    @classmethod
    def parse(cls, value: object) -> "TierSize":
        """Read `8GiB`, `500MB`, `5x`, or 0 for no tier.

        Raises:
            ValueError: it is no such size.
        """
        if isinstance(value, TierSize):
            return value
        text = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value
        match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or (match[2] is None and float(match[1])):
            raise ValueError(
                "must be a size with its unit, as 8GiB, or a multiple of the device's blocks, as 5x"
            )
        return cls(float(match[1]), match[2] or "B")

    @staticmethod
    def is_size(text: str) -> bool:
        """Say whether `parse` would read it."""
        match = _SIZE.fullmatch(text.strip())
        return match is not None and (match[2] is not None or not float(match[1]))

    def __bool__(self) -> bool:
        return self.number > 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TierSize) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{self.number:g}{self.unit}" if self else "0"

    @property
    def is_multiple(self) -> bool:
        """Whether it depends on the device's blocks."""
        return self.unit == "x"

    def shared_by(self, workers: int) -> "TierSize":
        """Return one worker's share of bytes; a multiple is each worker's own."""
        return self if self.is_multiple else TierSize(self.number / workers, self.unit)

    def blocks(self, num_blocks: int, block_bytes: float) -> int:
        """Convert to blocks.

        Args:
            num_blocks: of the device.
            block_bytes: size of one.

        Raises:
            ConfigError: it is less than one block, or more than 10,000 times the device's.
        """
        count = int(
            self.number * num_blocks if self.unit == "x" else self.number * _UNITS[self.unit] / block_bytes
        )
        if self and count < 1:
            raise ConfigError(
                f"{self} is less than one block of {block_bytes / 1e6:.3g} MB (the device has {num_blocks:,}); make it larger,"
                " or 0 for none"
            )
        if count > _MULTIPLE_MAX * num_blocks:
            raise ConfigError(
                f"{self} is {count / num_blocks:,.0f} times the {num_blocks:,} blocks of the device; expected at most"
                f" {_MULTIPLE_MAX:,} times"
            )
        return count

    @property
    def num_bytes(self) -> int:
        """In bytes.

        Raises:
            ValueError: it is a multiple of the device's blocks.
        """
        if self.unit == "x":
            raise ValueError(f"must be bytes, as 16MiB, got {self}, a multiple of the device's blocks")
        return int(self.number * _UNITS[self.unit])


Size = Annotated[
    TierSize,
    pydantic.PlainValidator(TierSize.parse),
    pydantic.PlainSerializer(str, return_type=str),
    pydantic.WithJsonSchema({"type": "string"}),
]
