"""Links of other regions, as the frontends that they ask see them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from penstock.core.errors import RequestError
from penstock.core.log import get_logger
from penstock.core.types.load import LINK_VERSION

REGION_HEADER = "X-Penstock-Region"
"""The region of a link, in each of its requests. Anybody may send it: it is only counted."""
_NAME = re.compile(r"[a-z0-9-]{1,40}")
_REGIONS_MAX = 64
_SKEW_S_MAX = 30.0
_OTHER = "other"
_FIXES = {
    "key": "give the link of that region a key of this server's frontend.api_key_file (regions.N.api_key_file there)",
    "version": "upgrade the older of the two deployments: at most one link version may lie between them",
    "secret": "give both regions the same secret (PENSTOCK_SECRET), name, model and block_size, and the link's API key no cache_salt"
    " of its own: until then neither uses what the other tells of its prefixes",
    "clock": "have both regions' hosts keep their time by NTP",
}
_log = get_logger()


class RegionLinks:
    """One frontend process's counts. One event loop owns it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the counters."""
        self._forwarded = Counter(
            "penstock_frontend_forwarded_requests",
            "Requests that came by the link of another region.",
            ["region"],
            registry=registry,
        )
        self._problems = Counter(
            "penstock_frontend_link_problems",
            "Questions of another region's link that have something wrong: its API key (key), its release (version), its clock (clock), or the secret of its block hashes (secret).",
            ["region", "problem"],
            registry=registry,
        )
        self._regions: set[str] = set()
        self._logged: set[tuple[str, str]] = set()

    def forwarded(self, headers: Mapping[str, str]) -> None:
        """Count a request, if it came by a link."""
        if REGION_HEADER in headers:
            self._forwarded.labels(self._region_of(headers[REGION_HEADER])).inc()

    def asked_load(self, query: Mapping[str, str]) -> None:
        """Check the version and clock that a link sends with `GET /load`; without a region it is not from a link."""
        if "region" not in query:
            return
        region = self._region_of(query["region"])
        self._ended(region, "key")
        version = _number(query.get("link", ""))
        self._note(region, "version", is_there=version is None or abs(version - LINK_VERSION) > 1)
        skew_s = _number(query.get("skew_s", ""))
        self._note(region, "clock", is_there=skew_s is not None and abs(skew_s) > _SKEW_S_MAX)

    def asked_prefixes(self, headers: Mapping[str, str], asked: bytes, own: bytes) -> None:
        """Compare the root hash of a link that asks for prefixes with this region's `own`."""
        if REGION_HEADER in headers and asked:
            self._note(self._region_of(headers[REGION_HEADER]), "secret", is_there=asked != own)

    def refused_key(self, headers: Mapping[str, str]) -> None:
        """Note a request with a wrong API key, if it came by a link."""
        if REGION_HEADER in headers:
            self._note(self._region_of(headers[REGION_HEADER]), "key", is_there=True)

    def _note(self, region: str, problem: str, *, is_there: bool) -> None:
        if not is_there:
            self._ended(region, problem)
            return
        self._problems.labels(region, problem).inc()
        if (region, problem) not in self._logged:
            self._logged.add((region, problem))
            _log.warning("region_link_problem", region=region, problem=problem, fix=_FIXES[problem])

    def _ended(self, region: str, problem: str) -> None:
        self._logged.discard((region, problem))

    def _region_of(self, name: str) -> str:
        """Give a region's name as a label: clients may send any, so few are kept."""
        if name in self._regions:
            return name
        if not _NAME.fullmatch(name) or len(self._regions) >= _REGIONS_MAX:
            return _OTHER
        self._regions.add(name)
        return name


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


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
            raise RequestError("missing; name the model whose prefixes are asked for", field="model")
        pairs = [pair for pair in query.get("after", "").split(",") if pair]
        if len(pairs) > _ORIGINS_MAX:
            raise RequestError(f"must name at most {_ORIGINS_MAX} routers, got {len(pairs)}", field="after")
        try:
            interval_s = float(query.get("interval_s", "1"))
        except ValueError:
            interval_s = math.nan
        if not 0 <= interval_s < math.inf:
            raise RequestError(f"must be >= 0 seconds, got {query['interval_s'][:40]!r}", field="interval_s")
        root = query.get("root", "")
        if len(root) > 2 * _ROOT_BYTES or not _HEX.fullmatch(root):
            raise RequestError(f"must be {_ROOT_BYTES} bytes in hex, got {root[:40]!r}", field="root")
        return cls(model, dict(map(_versioned, pairs)), interval_s, bytes.fromhex(root))


def _versioned(pair: str) -> tuple[int, int]:
    origin, _, version = pair.partition("-")
    if not all(
        text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX for text in (origin, version)
    ):
        raise RequestError(f"must be like ORIGIN-VERSION,..., got {pair[:60]!r}", field="after")
    return int(origin), int(version)
