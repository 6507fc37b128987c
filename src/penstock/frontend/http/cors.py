"""Cross-origin requests of browsers, and OPTIONS: which pages may use the API."""

from aiohttp import web

_MAX_AGE_S = 600
_EXPOSED = "X-Request-Id, Retry-After"


class Cors:
    """Allows pages of some origins to call the API. Immutable."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        """Args: origins: such as `https://chat.example.com`; `*` is any. Empty: none."""
        self._origins = frozenset(origins)
        self.is_on = bool(origins)

    def options(self, request: web.Request) -> web.Response | None:
        """Answer OPTIONS, a browser's preflight included; None for a path that does not exist."""
        error = request.match_info.http_exception
        if isinstance(error, web.HTTPMethodNotAllowed):
            methods = ", ".join(sorted({*error.allowed_methods, "OPTIONS"}))
        elif error is None:
            methods = "OPTIONS"
        else:
            return None
        response = web.Response(status=204, headers={"Allow": methods})
        if self._allows(request):
            asked = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Methods"] = methods
            response.headers["Access-Control-Allow-Headers"] = asked or "Authorization, Content-Type"
            response.headers["Access-Control-Max-Age"] = str(_MAX_AGE_S)
        return response

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell a browser that the page may read the response."""
        if not self.is_on or "Origin" not in request.headers:
            return
        response.headers["Vary"] = "Origin"
        if self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        is_allowed = "*" in self._origins or origin in self._origins
        return origin is not None and not is_operators(request) and is_allowed


def is_operators(request: web.BaseRequest) -> bool:
    """Tell whether a request is for those who run the server; no page of another site may send it."""
    return request.path.startswith(("/admin", "/watch"))
