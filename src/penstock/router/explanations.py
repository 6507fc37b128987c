"""The latest routing decisions: kept as arrays, and explained on request for people; docs/routing-reference.md names each field."""

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.core.types.events import Tier
from penstock.core.types.instances import Role
from penstock.router.config import ExplainConfig
from penstock.router.disagg import Comparison
from penstock.router.fleet.member import CONDITIONS, Condition, FleetMember
from penstock.router.selector import WorkerSelector


class RouteReason(StrEnum):
    """Why a worker was chosen, for any policy."""

    ONLY_WORKER = "only_worker"
    SESSION = "session"  # the worker of the request's session
    NO_PREFIX = "no_prefix"  # no worker holds any of it
    LONGEST_PREFIX = "longest_prefix"  # no worker holds more of it than the chosen one
    SHORTER_PREFIX = "shorter_prefix"  # another worker holds more of it, and costs more


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An eligible worker. `cost` is the sum of `terms` where the policy has terms; None rules the worker out.

    `overlap_blocks` of the prompt are cached there, `tier_blocks` of them in each tier.
    """

    worker: str
    cost: float | None
    terms: dict[str, float]
    overlap_blocks: int
    tier_blocks: dict[Tier, int]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the model that was not eligible, and why: its condition, or one of these.

    busy:            past a busy threshold
    excluded:        it refused this request, was lost with it, or was excluded by a gateway
    without_adapter: it does not serve the LoRA adapter
    other_role:      a prefill worker, where none was needed
    unfit:           a decode worker that cannot read the prefill worker's KV, or a prefill worker whose KV no decode worker
                     can read or which the prompt does not fit
    """

    worker: str
    why: str


class PrefillExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt is computed: `remote` by the prefill worker `worker`, else by the worker that answers.

    local, local_worker: cost of the whole request on one worker, and that worker
    prefill, prefill_worker: cost of the prompt on a prefill worker
    decode, decode_worker: cost of the rest on a decode worker, KV transfer included, with its fixed part `kv_transfer`
    link_setup: charge beside these for a link that was never used
    setting: the field of `router.disagg` that decided against these sums; None where the sums decided
    next_worker, reason, candidates, num_candidates: of the prefill worker, as an `RoutingExplanation` has them of the decode worker

    Costs are None where the policy's costs are no times, or where nothing was compared.
    """

    remote: bool
    local: float | None = None
    prefill: float | None = None
    decode: float | None = None
    link_setup: float | None = None
    kv_transfer: float | None = None
    local_worker: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    setting: str | None = None
    worker: str | None = None
    next_worker: str | None = None
    reason: RouteReason | None = None
    num_candidates: int = 0
    candidates: tuple[Candidate, ...] = ()


class RoutingExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One decision: `worker` answers.

    candidates: the chosen worker, the cheapest others, and the worker that holds most of the prefix; `num_candidates` in all
    left_out: workers that were not eligible; `num_left_out` in all
    prefill: where the prompt is computed, where there are prefill workers
    unit: of costs and terms: `ms`, or `none` where they are no times
    age_s: seconds since the decision
    """

    request_id: str
    model: str
    adapter: str | None
    policy: str
    reason: RouteReason
    unit: str
    worker: str
    next_worker: str | None
    request_tokens: int
    request_blocks: int
    block_size: int
    age_s: float
    num_candidates: int
    candidates: tuple[Candidate, ...]
    num_left_out: int
    left_out: tuple[LeftOut, ...]
    prefill: PrefillExplanation | None = None

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]


_OBJECT_BYTES = 1024  # of one decision beside its arrays' content


class ChoiceInputs(msgspec.Struct, frozen=True, eq=False):
    """The choice of one worker and its inputs, as columns by slot."""

    slot: int
    reason: RouteReason
    overlap_blocks: NDArray[np.int32]
    tier_blocks: NDArray[np.int32]
    terms: NDArray[np.float64]
    eligible: NDArray[np.bool_]

    @property
    def num_bytes(self) -> int:
        arrays = self.overlap_blocks.nbytes + self.tier_blocks.nbytes + self.terms.nbytes
        return arrays + self.eligible.nbytes

    def kept(self) -> "ChoiceInputs":
        """Copy what changes with the fleet."""
        return msgspec.structs.replace(self, eligible=self.eligible.copy())

    def shown(self, most: int) -> tuple[list[int], int | None]:
        """Give the slots to show: the chosen, the cheapest others, the longest prefix's; and the slot of the next best."""
        costs, slots = self.terms.sum(axis=0), np.flatnonzero(self.eligible)
        cheapest = slots[np.argsort(costs[slots], kind="stable")].tolist()
        cheapest.remove(self.slot)
        next_slot = cheapest[0] if cheapest and np.isfinite(costs[cheapest[0]]) else None
        shown = [self.slot, *cheapest[: most - 1]]
        holder = int(slots[self.overlap_blocks[slots].argmax()])
        if self.overlap_blocks[holder] > self.overlap_blocks[shown].max():
            shown.append(holder)
        return shown, next_slot


@dataclass(slots=True, eq=False)
class RoutingDecision:
    """The inputs of a plan, as columns by slot; immutable.

    decode:     the choice of the worker that answers
    prompt:     the choice of the prefill worker; None without one
    answering:  workers eligible to answer, before a prefill worker was chosen
    conditions: indices of `CONDITIONS`
    slots:      the worker in each slot
    excluded:   workers that must not get the request
    """

    request_id: str
    model: str
    adapter: str | None
    selector: WorkerSelector
    request_tokens: int
    request_blocks: int
    block_size: int
    decided_s: float
    decode: ChoiceInputs
    prompt: ChoiceInputs | None
    answering: NDArray[np.bool_]
    conditions: NDArray[np.uint8]
    slots: tuple[FleetMember | None, ...]
    excluded: Collection[WorkerId]
    comparison: Comparison | None
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        prompt = 0 if self.prompt is None else self.prompt.num_bytes
        self.num_bytes = (
            _OBJECT_BYTES + self.decode.num_bytes + prompt + self.answering.nbytes + self.conditions.nbytes
        )

    def explain(self, now_s: float, candidates_max: int) -> RoutingExplanation:
        """Explain it, with at most `candidates_max` of the candidates and of the workers left out."""
        part, left_out = self.decode, self._left_out()
        shown, next_slot = part.shown(candidates_max)
        return RoutingExplanation(
            request_id=self.request_id,
            model=self.model,
            adapter=self.adapter,
            policy=self.selector.policy.name,
            reason=part.reason,
            unit=self.selector.unit,
            worker=self._name(part.slot),
            next_worker=None if next_slot is None else self._name(next_slot),
            request_tokens=self.request_tokens,
            request_blocks=self.request_blocks,
            block_size=self.block_size,
            age_s=now_s - self.decided_s,
            num_candidates=int(np.count_nonzero(part.eligible)),
            candidates=tuple(self._candidate(part, slot) for slot in shown),
            num_left_out=len(left_out),
            left_out=tuple(left_out[:candidates_max]),
            prefill=self._prefill(candidates_max),
        )

    def _prefill(self, candidates_max: int) -> PrefillExplanation | None:
        compared, scale = self.comparison, self.selector.scale
        if compared is None:
            return None

        def scaled(cost: float | None) -> float | None:
            return None if cost is None or not np.isfinite(cost) else cost * scale

        explained = PrefillExplanation(
            remote=compared.is_remote,
            local=scaled(compared.local),
            prefill=scaled(compared.prefill),
            decode=scaled(compared.decode),
            link_setup=None if compared.remote is None else compared.link_setup * scale,
            kv_transfer=None if compared.remote is None else compared.kv_transfer * scale,
            local_worker=None if compared.local_slot is None else self._name(compared.local_slot),
            prefill_worker=None if compared.pair is None else self._name(compared.pair[0]),
            decode_worker=None if compared.pair is None else self._name(compared.pair[1]),
            setting=compared.setting,
        )
        part = self.prompt
        if part is None:
            return explained
        shown, next_slot = part.shown(candidates_max)
        return msgspec.structs.replace(
            explained,
            worker=self._name(part.slot),
            next_worker=None if next_slot is None else self._name(next_slot),
            reason=part.reason,
            num_candidates=int(np.count_nonzero(part.eligible)),
            candidates=tuple(self._candidate(part, slot) for slot in shown),
        )

    def _candidate(self, part: ChoiceInputs, slot: int) -> Candidate:
        scale = self.selector.scale
        terms = (part.terms[:, slot] * scale).tolist()
        cost = float(part.terms[:, slot].sum()) * scale
        return Candidate(
            worker=self._name(slot),
            cost=cost if np.isfinite(cost) else None,
            terms=dict(zip(self.selector.term_names, terms, strict=False)),
            overlap_blocks=int(part.overlap_blocks[slot]),
            tier_blocks=dict(zip(Tier, part.tier_blocks[:, slot].tolist(), strict=True)),
        )

    def _left_out(self) -> list[LeftOut]:
        """Say why each other worker of the model was not eligible."""
        left_out, eligible = [], self.decode.eligible
        if self.prompt is not None:
            eligible = eligible | self.prompt.eligible
        for slot, member in enumerate(self.slots):
            if member is None or eligible[slot] or member.instance.card.name != self.model:
                continue
            condition = CONDITIONS[self.conditions[slot]]
            if condition is None:
                continue  # it had just been listed
            why = condition.value
            if condition in {Condition.READY, Condition.PREFILL_ONLY}:
                why = self._why_not(slot, member)
            left_out.append(LeftOut(worker=member.instance.name, why=why))
        return left_out

    def _why_not(self, slot: int, member: FleetMember) -> str:
        """Say why a worker that was ready could not get the request."""
        if member.instance.role is Role.PREFILL and self.prompt is None:
            return "other_role"
        if self.adapter is not None and self.adapter not in member.instance.adapters:
            return "without_adapter"
        if member.worker_id in self.excluded:
            return "excluded"
        is_unfit = self.prompt is not None and (member.instance.role is Role.PREFILL or self.answering[slot])
        return "unfit" if is_unfit else "busy"

    def _name(self, slot: int) -> str:
        member = self.slots[slot]
        assert member is not None, f"slot {slot} was eligible"
        return member.instance.name


class Decisions:
    """The latest decisions, bounded by number and memory. One event loop owns it."""

    def __init__(self, config: ExplainConfig) -> None:
        self._config = config
        self._kept: deque[RoutingDecision] = deque()
        self._by_id: dict[str, list[RoutingDecision]] = {}  # under the request's id and under its answer's
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def keeps_any(self) -> bool:
        """Whether any decision is kept."""
        return self._config.decisions_max > 0

    def keep(self, decision: RoutingDecision) -> None:
        """Keep a decision; the oldest are dropped past the bounds."""
        kept, config = self._kept, self._config
        kept.append(decision)
        for key in _keys(decision.request_id):
            found = self._by_id.get(key)
            if found is None:
                self._by_id[key] = [decision]
            else:
                found.append(decision)
        self._num_bytes += decision.num_bytes
        while len(kept) > 1 and (len(kept) > config.decisions_max or self._num_bytes > config.bytes_max):
            self._forget(kept.popleft())

    def of(self, request_id: str) -> tuple[RoutingExplanation, ...]:
        """Explain the decisions about a request, oldest first; an answer's id stands for all its choices."""
        return self._explained(list(self._by_id.get(request_id, ())))

    def latest(self, most: int) -> tuple[RoutingExplanation, ...]:
        """Explain the latest decisions, oldest first."""
        return self._explained(list(self._kept)[-most:])

    def check(self) -> None:
        """Raise AssertionError where more is kept than allowed, or miscounted, or not found."""
        indexed = [decision for found in self._by_id.values() for decision in found]
        assert sorted(map(id, indexed)) == sorted(
            id(decision) for decision in self._kept for _ in _keys(decision.request_id)
        ), "decisions: index"
        assert all(self._by_id.values()), "decisions: an empty place in the index"
        assert self._num_bytes == sum(decision.num_bytes for decision in self._kept), "decisions: bytes"
        assert len(self._kept) <= self._config.decisions_max, f"{len(self._kept)} decisions: past the bound"
        assert len(self._kept) <= 1 or self._num_bytes <= self._config.bytes_max, (
            f"{self._num_bytes} bytes of decisions: past the bound"
        )

    def _forget(self, oldest: RoutingDecision) -> None:
        self._num_bytes -= oldest.num_bytes
        for key in _keys(oldest.request_id):
            found = self._by_id[key]
            del found[0]  # the oldest of all is the oldest there
            if not found:
                del self._by_id[key]

    def _explained(self, decisions: list[RoutingDecision]) -> tuple[RoutingExplanation, ...]:
        now_s, most = asyncio.get_running_loop().time(), self._config.candidates_max
        return tuple(decision.explain(now_s, most) for decision in decisions)


def _keys(request_id: str) -> tuple[str, ...]:
    """Give the ids that find a decision: the request's, and the answer's, which lacks the number of the choice."""
    answer_id, _, choice = request_id.rpartition("-")
    return (request_id, answer_id) if answer_id and choice.isdecimal() else (request_id,)
