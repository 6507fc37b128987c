"""The query of `GET /prefixes`, by which a link asks for the next changes of what a region tells of its prefixes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.errors import RequestError

_ORIGINS_MAX = 64
_DIGITS_MAX = 19


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """What a link asks: of a model, after these versions by router's process, with bytes for this many seconds."""

    model: str
    after: Mapping[int, int]
    interval_s: float

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
        return cls(model, dict(map(_versioned, pairs)), interval_s)


def _versioned(pair: str) -> tuple[int, int]:
    origin, _, version = pair.partition("-")
    if not all(
        text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX for text in (origin, version)
    ):
        raise RequestError(f"after: must be like ORIGIN-VERSION,..., got {pair[:60]!r}", param="after")
    return int(origin), int(version)
