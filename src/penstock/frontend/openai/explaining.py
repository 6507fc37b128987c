"""Decisions explained over HTTP, by whoever makes them: a frontend's dispatcher, or the router alone."""

import os
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from penstock.core.errors import RequestError

LATEST_DEFAULT = 16
LATEST_MAX = 64


class Decider(Protocol):
    """See `seams.RequestDispatcher`."""

    def explain(self, request_id: str) -> Sequence[object]: ...

    def latest_decisions(self, most: int) -> Sequence[object]: ...


class Explanation(msgspec.Struct):
    """Decisions, oldest first: what every explanation looks like, whoever gives it."""

    decisions: Sequence[object]


class ProcessExplanation(Explanation):
    """What is told to who asks a process: it knows its own decisions alone, and several may share a port."""

    pid: int


def why_one(decider: Decider, request: web.Request) -> ProcessExplanation:
    """Explain the request that the path names.

    Raises:
        RequestError: nothing is known of it (404), or more is asked than that.
    """
    _check_keys(request, [])
    request_id = request.match_info["id"]
    decisions = decider.explain(request_id)
    if not decisions:
        raise RequestError(
            f"id: no decision about {request_id!r} is known here; give an answer's id, soon: the latest are kept"
            " (router.explain)",
            http_status=404,
            param="id",
        )
    return ProcessExplanation(decisions, os.getpid())


def why_latest(decider: Decider, request: web.Request) -> ProcessExplanation:
    """Explain the latest decisions, as many as `?last=` says.

    Raises:
        RequestError: it says no number, or too large a one, or something else.
    """
    _check_keys(request, ["last"])
    given = request.query.get("last", str(LATEST_DEFAULT))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= LATEST_MAX):
        raise RequestError(f"last: must be 1 to {LATEST_MAX}, got {given[:40]!r}", param="last")
    return ProcessExplanation(decider.latest_decisions(int(given)), os.getpid())


def _check_keys(request: web.Request, known: Sequence[str]) -> None:
    """Refuse what is asked for and not known."""
    for key in request.query:
        if key not in known:
            expected = f"{', '.join(known)} only" if known else "nothing"
            raise RequestError(
                f"{key[:40]!r} after the '?' of {request.path} is not known; expected {expected}",
                param=key[:40],
            )
