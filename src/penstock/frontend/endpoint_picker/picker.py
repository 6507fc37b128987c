"""What chooses an endpoint: the routing service, asked with the body of a request."""

import asyncio
import contextlib
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.core.errors import RequestError, Unavailable
from penstock.frontend.endpoint_picker.query import query_of
from penstock.frontend.requests.preprocess import THREAD_BYTES
from penstock.frontend.requests.route.model import RouteModel
from penstock.router.service.gateway import Stage
from penstock.router.service.routing_service import RoutingService
from penstock.router.workers.member import Condition

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Pick:
    """An endpoint, `IP:PORT`, and the router's id of the request there."""

    id: str
    endpoint: str


class Picker:
    """Picks endpoints from the servers of a `RoutingService`. One event loop owns it."""

    def __init__(
        self, service: RoutingService, model: RouteModel | None, *, body_bytes_max: int, body_timeout_s: float
    ) -> None:
        """Pick from the servers that the service knows; `model` tokenizes text for its servers."""
        self._service = service
        self._model = model
        self.body_bytes_max = body_bytes_max
        self.body_timeout_s = body_timeout_s

    @property
    def is_ready(self) -> bool:
        """Whether some server may get requests."""
        return any(view.condition is Condition.READY for view in self._service.workers())

    async def pick(self, body: bytes, subset: frozenset[str] | None) -> Pick:
        """Pick the endpoint for a request and count it there, until its final feedback.

        Args:
            body: of the request, whole.
            subset: endpoints to pick from; None: all.

        Raises:
            RequestError: the body is invalid, or no server has its model (404).
            Overloaded: too many requests are open.
            Unavailable: no server may get it.
        """
        views = self._service.workers()
        models = sorted({view.model for view in views})
        excluded = tuple(
            view.name for view in views if subset is not None and endpoint_of(view.address) not in subset
        )
        if subset is not None and len(excluded) == len(views):
            raise Unavailable(
                f"none of the {len(subset)} endpoints that the gateway allows is a server that is known here",
                retry_after_s=1.0,
            )
        if len(body) > THREAD_BYTES:
            query = await asyncio.to_thread(query_of, body, models, self._model, excluded)
        else:
            query = query_of(body, models, self._model, excluded)
        choice = self._service.route(query)
        return Pick(choice.id, endpoint_of(choice.url))

    def feedback(
        self, pick: Pick, stage: Stage, *, cached_tokens: int | None = None, output_tokens: int | None = None
    ) -> None:
        """Tell the router how far a request is; one that was silent for too long is not known any more."""
        with contextlib.suppress(RequestError):
            self._service.feedback(pick.id, stage, cached_tokens, output_tokens)


def endpoint_of(url: str) -> str:
    """Give `IP:PORT` of a server's URL, the IP of an IPv6 address in brackets."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS[parts.scheme]}"
