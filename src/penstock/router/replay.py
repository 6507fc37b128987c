"""Replays: decisions made again from their log lines, by the same policy or another.

A log line has a decision's inputs as plain data: fields by name, arrays with type and shape, back to the same bits.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np

from penstock.core.errors import ConfigError, PenstockError
from penstock.router.config import DisaggConfig
from penstock.router.disagg import DisaggInputs, decide
from penstock.router.fleet.links import KvKinds
from penstock.router.policies import SESSION_IDLE_S, SESSIONS_MAX, make_policy
from penstock.router.selector import WorkerSelector
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
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, _Nested):
            value = _record(value)
        elif isinstance(value, np.ndarray):
            value = _record_array(value)
        data[each.name] = value
    return data


def _record_array(array: np.ndarray) -> list[Any]:
    """Write [type, shape, values]: one value stands for all where they are equal, as most columns' are."""
    if array.size and bool((array == array.flat[0]).all()):
        return [array.dtype.name, list(array.shape), array.flat[0].item()]
    return [array.dtype.name, list(array.shape), array.ravel().tolist()]


def _values(data: Any, kind: type[_Recorded]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDecision:
    """A decision made again.

    worker, again: the logged and the new choice; `prefill/decode` where two workers were chosen
    costs_more: cost of the logged choice beyond the new one, by the new policy; None where only one of the two is
        disaggregated and the policy's costs do not compare these
    """

    request_id: str
    policy: str
    worker: str
    again: str
    costs_more: float | None
    unit: str

    @property
    def differs(self) -> bool:
        return self.worker != self.again


@dataclass(slots=True)
class RoutingReplay:
    """Makes decisions again, in the order of their log, with one policy object for each process that logged.

    A `seams.HistoryPolicy` is told the logged choices, so it repeats itself if the log has its decisions from the start.
    """

    policy: str | None = None
    """As `router.policy`; None is each line's own policy."""
    other_lines: Counter[str] = field(default_factory=Counter)
    """Lines without a decision: `event` of another kind, and `text` that is no JSON."""
    _selectors: dict[tuple[str, str], WorkerSelector] = field(default_factory=dict)

    def run(self, lines: Iterable[str]) -> Iterator[ReplayedDecision]:
        """Make the decisions of these lines again.

        Raises:
            ConfigError: a line's decision cannot be read, there is no such policy, or it fails.
        """
        for number, line in enumerate(lines, 1):
            found = self._read(line)
            if found is None:
                continue
            process, data = found
            try:
                yield self._again(process, msgspec.convert(data, RecordedDecision))
            except (msgspec.ValidationError, ValueError, IndexError) as error:
                raise ConfigError(f"line {number}: a decision that cannot be read: {error}") from error
            except ConfigError:
                raise
            except PenstockError as error:
                raise ConfigError(f"line {number}: {error.message}") from error

    def _read(self, line: str) -> tuple[str, dict[str, object]] | None:
        """Give a decision's process and fields; None for other lines."""
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            if line.strip():
                self.other_lines["text"] += 1
            return None
        if data.get("event") != EVENT:
            self.other_lines["event"] += 1
            return None
        return str(data.get("process", "")), data

    def _again(self, process: str, recorded: RecordedDecision) -> ReplayedDecision:
        context = recorded_context(recorded.context)
        name = self.policy or recorded.policy
        selector = self._selectors.get((process, name))
        if selector is None:
            policy = make_policy(
                name, sessions_max=recorded.sessions_max, session_idle_s=recorded.session_idle_s
            )
            selector = self._selectors[process, name] = WorkerSelector(policy)
        then = recorded.slot, recorded.prefill_slot
        now: tuple[int, int | None]
        costs_more: float | None
        if recorded.inputs is None:
            choice = selector.choose(context, recorded.tie)
            prices = choice.prices()
            now, costs_more = (choice.slot, None), float(prices[then[0]] - prices[choice.slot])
            selector.chosen(context, then[0])
        else:
            decision = decide(selector, context, recorded.tie, recorded_inputs(recorded.inputs))
            now, costs_more = decision.slots, decision.costs_more(*then)
            if then[1] is not None:
                selector.chosen(decision.prompt_context, then[1])
                context = decision.rest_context or context
            selector.chosen(context, then[0])
        return ReplayedDecision(
            request_id=recorded.request_id,
            policy=name,
            worker=_named(recorded, *then),
            again=_named(recorded, *now),
            costs_more=costs_more if not costs_more or now == then else costs_more * selector.scale,
            unit=selector.unit,
        )


def _named(recorded: RecordedDecision, decode: int, prefill: int | None) -> str:
    name = recorded.workers[decode] or ""
    return name if prefill is None else f"{recorded.workers[prefill] or ''}/{name}"
