"""The query of `GET /prefixes`, by which a link asks for the next changes of what a region tells of its prefixes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.errors import RequestError

_ORIGINS_MAX = 64
_DIGITS_MAX = 19
_ROOT_BYTES = 16
_HEX = re.compile(r"([0-9a-f]{2})*")


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """What a link asks: of a model, after these versions by router's process, with bytes for this many seconds.

    `root` is the parent of its first block hashes; empty where it does not say.
    """

    model: str
    after: Mapping[int, int]
    interval_s: float
    root: bytes = b""

    @classmethod
    def read(cls, query: Mapping[str, str]) -> "PrefixQuery":
        """Read a query string.

        Raises:
            RequestError: a value is missing or wrong.
        """
        model = query.get("model", "")
        if not model:
            raise RequestError("model: missing; name the model whose prefixes are asked for", param="model")
        pairs = [pair for pair in query.get("after", "").split(",") if pair]
        if len(pairs) > _ORIGINS_MAX:
            raise RequestError(
                f"after: must name at most {_ORIGINS_MAX} routers, got {len(pairs)}", param="after"
            )
        try:
            interval_s = float(query.get("interval_s", "1"))
        except ValueError:
            interval_s = math.nan
        if not 0 <= interval_s < math.inf:
            raise RequestError(
                f"interval_s: must be >= 0 seconds, got {query['interval_s'][:40]!r}", param="interval_s"
            )
        root = query.get("root", "")
        if len(root) > 2 * _ROOT_BYTES or not _HEX.fullmatch(root):
            raise RequestError(f"root: must be {_ROOT_BYTES} bytes in hex, got {root[:40]!r}", param="root")
        return cls(model, dict(map(_versioned, pairs)), interval_s, bytes.fromhex(root))


def _versioned(pair: str) -> tuple[int, int]:
    origin, _, version = pair.partition("-")
    if not all(
        text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX for text in (origin, version)
    ):
        raise RequestError(f"after: must be like ORIGIN-VERSION,..., got {pair[:60]!r}", param="after")
    return int(origin), int(version)
