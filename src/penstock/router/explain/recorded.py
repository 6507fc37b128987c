"""A decision's inputs as plain data for its log line, and back to the same bits.

Fields are written by name, arrays with type and shape, whatever fields a `RoutingContext` has.
"""

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from penstock.router.config import DisaggConfig
from penstock.router.disagg.disagg import DisaggInputs
from penstock.router.links.kv_transfer_pairs import KvKinds
from penstock.router.policy.session_affinity import SESSION_IDLE_S, SESSIONS_MAX
from penstock.seams import PriceColumns, RoutingContext

EVENT = "request_routed"
"""Event name of the log line."""
_Nested = PriceColumns | KvKinds
_NESTED: dict[str, type[_Nested]] = {"prices": PriceColumns, "kinds": KvKinds}
_Recorded = RoutingContext | DisaggInputs | _Nested


class RecordedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One log line's fields.

    worker, slot: the worker that answers
    prefill_slot: the prefill worker's slot; None without one
    tie: settles equal prices
    workers: names by slot, None for a free slot
    sessions_max, session_idle_s: of a policy that keeps sessions
    """

    request_id: str
    model: str
    policy: str
    worker: str
    slot: int
    tie: int
    workers: list[str | None]
    context: dict[str, Any]
    """Of the whole request."""
    inputs: dict[str, Any] | None = None
    """Of the disaggregation decision; None where there was none."""
    prefill_slot: int | None = None
    sessions_max: int = SESSIONS_MAX
    session_idle_s: float = SESSION_IDLE_S


def record_context(context: RoutingContext) -> dict[str, Any]:
    """Write a context as plain data."""
    return _record(context)


def recorded_context(data: dict[str, Any]) -> RoutingContext:
    """Make the context again.

    Raises:
        ValueError: it is not what this version writes.
    """
    return RoutingContext(**_values(data, RoutingContext))


def record_inputs(inputs: DisaggInputs) -> dict[str, Any]:
    """Write the inputs of a disaggregation decision as plain data."""
    return _record(inputs) | {"config": inputs.config.model_dump()}


def recorded_inputs(data: dict[str, Any]) -> DisaggInputs:
    """Make the inputs again.

    Raises:
        ValueError: it is not what this version writes.
    """
    config = data.get("config")
    return DisaggInputs(
        **_values(data | {"config": None}, DisaggInputs) | {"config": DisaggConfig.model_validate(config)}
    )


def _record(record: _Recorded) -> dict[str, Any]:
    data = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, _Nested):
            value = _record(value)
        elif isinstance(value, np.ndarray):
            value = _record_array(value)
        data[field.name] = value
    return data


def _record_array(array: np.ndarray) -> list[Any]:
    """Write [type, shape, values]: one value stands for all where they are equal, as most columns' are."""
    if array.size and bool((array == array.flat[0]).all()):
        return [array.dtype.name, list(array.shape), array.flat[0].item()]
    return [array.dtype.name, list(array.shape), array.ravel().tolist()]


def _values(data: Any, kind: type[_Recorded]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    if not isinstance(data, dict) or data.keys() != names:
        differ = ", ".join(sorted(names ^ (data.keys() if isinstance(data, dict) else set())))
        raise ValueError(f"written by another version: {differ} are not the fields of both")
    values: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            nested = _NESTED.get(name)
            if nested is None:
                raise ValueError(f"{name}: has fields, which this version does not write")
            values[name] = nested(**_values(value, nested))
        else:
            values[name] = _array(name, value) if isinstance(value, list) else value
    return values


def _array(name: str, recorded: list[Any]) -> np.ndarray:
    try:
        kind, shape, content = recorded
        if not isinstance(content, list):
            return np.full(shape, content, dtype=kind)
        return np.array(content, dtype=kind).reshape(shape)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise ValueError(f"{name}: is no array as this version writes them: {error}") from error
