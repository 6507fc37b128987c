"""Replays: decisions made again from their log lines, by the same policy or another."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from penstock.core.errors import ConfigError, PenstockError
from penstock.router.disagg.disagg import decide
from penstock.router.explain.recorded import EVENT, RecordedDecision, recorded_context, recorded_inputs
from penstock.router.policy.policies import make_policy
from penstock.router.policy.selector import WorkerSelector


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
