"""An operator's actions on the KV caches of workers."""

import asyncio

import msgspec

from penstock.core.errors import PenstockError, RequestError, Unavailable
from penstock.core.types.kv import KvAction, KvPinned, KvReport
from penstock.router.dispatch.named_workers import connection_of, find_worker
from penstock.router.fleet.fleet import Fleet
from penstock.router.workers.member import FleetMember

_ANSWER_S_MAX = 10.0


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
            return [_acted(member, await _ask(member, action))]
        of_workers = {
            member.instance.registration: member
            for member in self._fleet.slots.now()
            if member is not None and member.listed and member.connection
        }
        members = list(of_workers.values())
        if not members:
            raise Unavailable("no worker is connected; try again when one is")
        outcomes = await asyncio.gather(*(_ask(member, action) for member in members), return_exceptions=True)
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


async def _ask(member: FleetMember, action: KvAction) -> KvReport:
    """Ask one worker.

    Raises:
        RequestError: it refuses.
        Unavailable: it cannot be reached, or has not answered.
    """
    connection = connection_of(member)
    try:
        async with asyncio.timeout(_ANSWER_S_MAX):
            report = await connection.change(action)
    except TimeoutError as error:
        raise Unavailable(
            f"worker {member.instance.name} has not answered within {_ANSWER_S_MAX:g} s"
        ) from error
    if report is None:
        raise RequestError(
            f"worker {member.instance.name} is of another version: it gave no report", http_status=409
        )
    return report
