"""Routing decisions over HTTP, from a frontend's dispatcher or the standalone router."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from penstock.core.errors import RequestError

LATEST_DEFAULT = 16
LATEST_MAX = 64


class DecisionSource(Protocol):
    """Gives routing decisions; see `seams.RequestDispatcher`."""

    def explain(self, request_id: str) -> Sequence[object]: ...

    def latest_decisions(self, most: int) -> Sequence[object]: ...


class Explanation(msgspec.Struct):
    """Routing decisions, oldest first."""

    decisions: Sequence[Any]


class ProcessExplanation(Explanation):
    """Decisions of one process. Several processes may share a port, and each knows only its own decisions."""

    pid: int


def explain_one(source: DecisionSource, request: web.Request) -> ProcessExplanation:
    """Give the decisions about the request id in the path.

    Raises:
        RequestError: the id is unknown (404), or the query has a parameter.
    """
    _check_keys(request, [])
    request_id = request.match_info["id"]
    decisions = source.explain(request_id)
    if not decisions:
        raise RequestError(
            f"id: no decision about {request_id!r} is known here: it is too old, or another frontend process decided it;"
            " give an answer's id, soon, or raise router.explain.decisions_max",
            http_status=404,
            param="id",
        )
    return ProcessExplanation(decisions, os.getpid())


def explain_latest(source: DecisionSource, request: web.Request) -> ProcessExplanation:
    """Give the latest decisions, `?last=` of them.

    Raises:
        RequestError: `last` is no number or too large, or the query has another parameter.
    """
    _check_keys(request, ["last"])
    given = request.query.get("last", str(LATEST_DEFAULT))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= LATEST_MAX):
        raise RequestError(f"last: must be 1 to {LATEST_MAX}, got {given[:40]!r}", param="last")
    return ProcessExplanation(source.latest_decisions(int(given)), os.getpid())


def _check_keys(request: web.Request, known: Sequence[str]) -> None:
    """Raise RequestError for an unknown query parameter."""
    for key in request.query:
        if key not in known:
            expected = f"{', '.join(known)} only" if known else "nothing"
            raise RequestError(
                f"{key[:40]!r} after the '?' of {request.path} is not known; expected {expected}",
                param=key[:40],
            )
