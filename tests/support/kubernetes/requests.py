"""What a request asks: its verb, who writes, its body; and the merge patch."""

import json
from typing import Any

from aiohttp import web

from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.problems import Refused
from tests.support.kubernetes.resources import Object


def failed() -> web.Response:
    return web.json_response(
        Refused(500, "InternalError", "etcdserver: request timed out").status(), status=500
    )


def merge(live: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(live) if isinstance(live, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def verb_of(request: web.Request, name: str, subresource: str = "") -> str:
    match request.method:
        case "GET" if name:
            return "get"
        case "GET":
            return "watch" if request.query.get("watch") in {"true", "1"} else "list"
        case "POST" if not name or subresource == "eviction":
            return "create"
        case "PUT" if name:
            return "update"
        case "PATCH" if name:
            return "patch"
        case "DELETE" if name:
            return "delete"
    raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def manager_of(request: web.Request, subresource: str) -> Manager:
    agent = request.headers.get("User-Agent", "unknown").partition("/")[0]
    return Manager(request.query.get("fieldManager", agent), "Update", subresource)


def token_in(request: web.Request) -> str:
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if kind == "Bearer" else ""


def object_of(data: bytes) -> Object:
    try:
        body = json.loads(data)
    except ValueError as error:
        raise Refused(400, "BadRequest", f"the object provided is unrecognized: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "BadRequest", "the object provided is no object")
    return body
