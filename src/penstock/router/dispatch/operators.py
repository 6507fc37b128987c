"""What operators ask of workers by name: another role, sleep and waking up, and actions on their KV caches.

The worker changes itself. Discovery tells every router, and this router waits until it has heard. A change of role that would
leave a model without a worker that answers is refused.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from penstock.core.errors import PenstockError, RequestError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.types.instances import BecomeRole, InstanceState, Role, Sleep, WakeUp, WorkerChange
from penstock.core.types.kv import KvAction, KvPinned, KvReport
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.member import Condition, FleetMember
from penstock.seams import Connection

_NAMED_MAX = 16


def find_worker(fleet: Fleet, name: str) -> FleetMember:
    """Find the worker of this name; of several, as during a restart, the connected one. Any rank stands for its worker.

    Raises:
        RequestError: there is none (404), a rank is named alone, or several workers have this name (409).
    """
    listed = [member for member in fleet.slots.now() if member is not None and member.listed]
    named = [member for member in listed if member.instance.worker == name]
    found = [member for member in named if member.connection is not None] or named
    if not found:
        ranks = [member.instance for member in listed if member.instance.name == name]
        if ranks:
            raise RequestError(
                f"{name} is a data-parallel rank of worker {ranks[0].worker}, which changes as a whole; name {ranks[0].worker}",
                http_status=409,
                param="worker",
            )
        names = sorted({member.instance.worker for member in listed})
        known = ", ".join(names[:_NAMED_MAX]) + (" ..." if len(names) > _NAMED_MAX else "")
        raise RequestError(
            f"there is no worker {name[:100]!r}; known: {known or 'none'}",
            http_status=404,
            param="worker",
        )
    registered = {member.instance.registration for member in found}
    if len(registered) > 1:
        ids = ", ".join(map(str, sorted(registered)))
        raise RequestError(
            f"{len(registered)} workers are called {name} ({ids}); give each a name of its own",
            http_status=409,
        )
    return found[0]


def connection_of(member: FleetMember) -> Connection:
    """Give the connection to a worker.

    Raises:
        Unavailable: there is none.
    """
    if member.connection is None:
        why = "" if member.problem is None else f": {member.problem.message}"
        raise Unavailable(f"worker {member.instance.name} cannot be reached{why}; try again when it is back")
    return member.connection


_ANSWER_S_MAX = 600.0
"""Longest wait for a worker's answer; draining takes less, unless set otherwise."""
_HEARD_S_MAX = 10.0


class WorkerRoleChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A role change; `took_s` lasts from the request until this router may use the worker in its new role."""

    worker: str
    before: Role
    role: Role
    took_s: float


class StateChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A worker fell asleep or woke up; `took_s` lasts from the request until this router knows."""

    worker: str
    state: InstanceState
    took_s: float


class FleetChanges:
    """Asks workers to change. One event loop owns it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._to_prefill: set[WorkerId] = set()

    async def change_role(self, name: str, role: Role) -> WorkerRoleChanged:
        """Change a worker's role, and wait until this router may use it.

        Raises:
            RequestError: no worker has this name (404), or it cannot take the role (409).
            Unavailable: the worker cannot be reached, or has not answered.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        member = find_worker(self._fleet, name)
        before = member.instance.role
        connection = connection_of(member)
        others = self._others_that_answer(member)
        if before is Role.PREFILL:
            _check_context(member, others)
        elif role is Role.PREFILL:
            _check_not_last(member, others)
            self._to_prefill.add(member.instance.registration)
        try:
            await _ask(member, connection, BecomeRole(role=role), str(role))
        finally:
            self._to_prefill.discard(member.instance.registration)
        await self._heard(member, InstanceState.READY, role, str(role))
        return WorkerRoleChanged(worker=name, before=before, role=role, took_s=loop.time() - asked_s)

    async def sleep(self, name: str, level: int) -> StateChanged:
        """Have a worker drain and give up its memory.

        Raises:
            RequestError: no worker has this name (404), there is no such level (400), or it cannot sleep now (409).
            Unavailable: the worker cannot be reached, or has not answered.
        """
        return await self._change_state(name, Sleep(level=level), InstanceState.ASLEEP)

    async def wake_up(self, name: str) -> StateChanged:
        """Have a worker that sleeps take requests again.

        Raises:
            RequestError: no worker has this name (404), or it is awake (409).
            Unavailable: the worker cannot be reached, or has not answered.
        """
        return await self._change_state(name, WakeUp(), InstanceState.READY)

    async def _change_state(self, name: str, change: WorkerChange, state: InstanceState) -> StateChanged:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        member = find_worker(self._fleet, name)
        await _ask(member, connection_of(member), change, state)
        await self._heard(member, state, member.instance.role, state)
        return StateChanged(worker=name, state=state, took_s=loop.time() - asked_s)

    def _others_that_answer(self, member: FleetMember) -> list[FleetMember]:
        """Find the other workers of the model that answer requests and are not becoming prefill workers."""
        return [
            other
            for other in self._fleet.slots.now()
            if other is not None
            and other.instance.registration != member.instance.registration
            and other.condition is Condition.READY
            and other.instance.card.name == member.instance.card.name
            and other.instance.registration not in self._to_prefill
        ]

    async def _heard(self, member: FleetMember, state: InstanceState, role: Role, what: str) -> None:
        """Wait until discovery reports the new state and role."""
        changed = asyncio.Event()
        try:
            async with asyncio.timeout(_HEARD_S_MAX):
                with self._fleet.changes.telling(changed.set):
                    while (member.instance.role, member.instance.state) != (role, state):
                        changed.clear()
                        await changed.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"worker {member.instance.worker} has become {what}, but discovery has not said so here within"
                f" {_HEARD_S_MAX:g} s; is the registry there?"
            ) from error


async def _ask(member: FleetMember, connection: Connection, change: WorkerChange, what: str) -> None:
    """Ask a worker for a change.

    Raises:
        RequestError: it refuses.
        Unavailable: it has not answered.
    """
    try:
        async with asyncio.timeout(_ANSWER_S_MAX):
            await connection.change(change)
    except TimeoutError as error:
        raise Unavailable(
            f"worker {member.instance.worker} has not become {what} within {_ANSWER_S_MAX:g} s; GET /admin/workers says what"
            " it is, worker.drain_timeout_s how long what it has may take"
        ) from error


def _check_not_last(member: FleetMember, others: Sequence[FleetMember]) -> None:
    """Refuse to change the last worker that answers for a model or an adapter.

    Raises:
        RequestError: the worker is the last (409).
    """
    instance = member.instance
    adapters = {adapter for other in others for adapter in other.instance.adapters}
    lacking = [adapter for adapter in instance.adapters if adapter not in adapters]
    if not others or lacking:
        what = f"model {instance.card.name}" if not others else f"adapter {lacking[0]}"
        raise RequestError(
            f"{instance.worker} is the last worker that answers for {what}: as a prefill worker it would only"
            " compute prompts; make another one a decode worker first",
            http_status=409,
        )


def _check_context(member: FleetMember, others: Sequence[FleetMember]) -> None:
    """Refuse to let a prefill worker answer whose context is shorter than others'.

    Raises:
        RequestError: its KV holds fewer tokens than another worker's (409).
    """
    own = member.instance.card.context_length
    longest = max((other.instance.card.context_length for other in others), default=own)
    if own < longest:
        raise RequestError(
            f"{member.instance.worker} holds at most {own} tokens of a request and others that answer {longest}: what it answered"
            " would end sooner; choose a worker with as much KV",
            http_status=409,
        )


_KV_ANSWER_S_MAX = 10.0


class KvActed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an action did at one worker, or why it could not.

    Attributes:
        blocks: that were pinned, unpinned, evicted or flushed.
        pins: of a list.
        problem: why the worker refused.
    """

    worker: str
    blocks: int = 0
    pins: tuple[KvPinned, ...] = ()
    problem: str | None = None


class FleetKvActions:
    """Asks one worker, or all at once. One event loop owns it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def act(self, action: KvAction, worker: str | None) -> list[KvActed]:
        """Act at a worker, or at every worker for None.

        Raises:
            RequestError: no worker has this name (404), it refuses, or all refuse.
            Unavailable: the worker cannot be reached, or no worker is there.
        """
        if worker is not None:
            member = find_worker(self._fleet, worker)
            return [_acted(member, await _ask_kv(member, action))]
        of_workers = {
            member.instance.registration: member
            for member in self._fleet.slots.now()
            if member is not None and member.listed and member.connection
        }
        members = list(of_workers.values())
        if not members:
            raise Unavailable("no worker is connected; try again when one is")
        outcomes = await asyncio.gather(
            *(_ask_kv(member, action) for member in members), return_exceptions=True
        )
        acted, refused = [], []
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, PenstockError):
                refused.append(outcome)
                acted.append(KvActed(worker=member.instance.worker, problem=outcome.message))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                acted.append(_acted(member, outcome))
        if len(refused) == len(members):
            raise refused[0]
        return acted


def _acted(member: FleetMember, report: KvReport) -> KvActed:
    return KvActed(worker=member.instance.worker, blocks=report.blocks, pins=report.pins)


async def _ask_kv(member: FleetMember, action: KvAction) -> KvReport:
    """Ask one worker.

    Raises:
        RequestError: it refuses.
        Unavailable: it cannot be reached, or has not answered.
    """
    connection = connection_of(member)
    try:
        async with asyncio.timeout(_KV_ANSWER_S_MAX):
            report = await connection.change(action)
    except TimeoutError as error:
        raise Unavailable(
            f"worker {member.instance.name} has not answered within {_KV_ANSWER_S_MAX:g} s"
        ) from error
    if report is None:
        raise RequestError(
            f"worker {member.instance.name} is of another version: it gave no report", http_status=409
        )
    return report
