"""What operators do to the KV cache of a worker's engine."""

from penstock.core.errors import PenstockError, RequestError
from penstock.core.types.kv import KvAction, KvReport
from penstock.seams import Engine, KvManaged


def act(engine: Engine, action: KvAction, *, worker: str, engine_name: str) -> KvReport | PenstockError:
    """Act on an engine's KV cache; give what it reports, or why it cannot."""
    if not isinstance(engine, KvManaged):
        return RequestError(
            f"{worker}: engine {engine_name} has no KV cache that operators can manage; paged and mock have",
            http_status=409,
        )
    try:
        return engine.act(action)
    except PenstockError as error:
        return error
