"""Scales a deployment of several hosts, each of which scales its own workers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from penstock.core.errors import PenstockError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import Replica, Role, RoleLimit, Scale
from penstock.core.types.scaling_rules import check_add, check_flip, check_retire, conflict, ready_roles


class Host(Protocol):
    """A `ScalingConnector` of one host's workers. `elsewhere` names roles that ready workers of other hosts have.

    A host's last worker of such a role may leave; without, it stays. Errors as of `ScalingConnector`.
    """

    async def scale(self, after: int | None = None) -> Scale: ...

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]: ...

    async def retire(
        self,
        names: Sequence[str],
        *,
        by: str,
        revision: int | None = None,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> None: ...

    async def flip(
        self,
        name: str,
        role: Role,
        *,
        by: str,
        revision: int | None = None,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> None: ...


class Hosts(Protocol):
    """Takes hosts as they come and go.

    Attributes:
        given_up: called with the name of each host that was lost and is no longer waited for.
    """

    given_up: Callable[[str], None]

    def join(self, name: str, host: Host, scale: Scale) -> None:
        """Take a host, whose workers are as `scale` says.

        Raises:
            PenstockError: it cannot be one of them.
        """
        ...

    def leave(self, name: str, *, on_purpose: bool) -> None:
        """Note that a host does not answer any more; `on_purpose`: it ends."""
        ...

    def label(self, name: str, process: str) -> str:
        """Give the name that a host's process has among those of all hosts."""
        ...


_WAIT_S_MAX = 20.0
_REASONS_MAX = 3
_FRONTENDS_HOLD_S = 60.0
_log = get_logger()
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Member:
    """A host. `known` is the revision of its workers that this connector has taken account of."""

    name: str
    host: Host
    scale: Scale
    known: int
    pending: int = 0
    """Orders that it has not answered yet."""
    lost_s: float | None = None
    """Since when it does not answer; None while it does."""
    unanswered_by: str = ""
    """Who gave the last order, where its answer was lost; it may have been obeyed."""

    def replicas(self) -> Iterator[Replica]:
        for replica in self.scale.replicas:
            yield msgspec.structs.replace(replica, name=f"{replica.name}@{self.name}")


class HostsConnector:
    """A `seams.ScalingConnector` of many hosts, whose workers are called `WORKER@HOST`. One event loop owns it.

    A change of several hosts is begun at all of them or none, as far as they answer: workers that were added at one are retired
    where another refuses. A change that somebody makes at a host by itself is a change of the deployment.
    """

    def __init__(self, *, settle_s: float = 15.0, lost_after_s: float = 15.0, hold_s: float = 600.0) -> None:
        """Make a deployment without hosts.

        Args:
            settle_s: nothing changes for so long, in which hosts connect to a planner that was started.
            lost_after_s: workers of a host that does not answer count for so long; frontends may still reach them.
            hold_s: while a host was lost less than so long ago, no worker leaves or changes its role.
        """
        self.given_up: Callable[[str], None] = lambda _name: None
        self._settle_s = settle_s
        self._lost_after_s = lost_after_s
        self._hold_s = hold_s
        self._begun_s: float | None = None
        self._members: dict[str, _Member] = {}
        self._lost: dict[str, _Member] = {}
        self._sequence = 0
        self._revision = 0
        self._changed_by = ""
        self._view: object = None
        self._news: set[asyncio.Future[None]] = set()

    # -- Hosts

    def join(self, name: str, host: Host, scale: Scale) -> None:
        self._begin()
        self._lost.pop(name, None)
        self._members[name] = _Member(name, host, scale, scale.revision)
        self._wake()

    def leave(self, name: str, *, on_purpose: bool) -> None:
        member = self._members.pop(name, None)
        if member is not None and not on_purpose:
            member.lost_s = asyncio.get_running_loop().time()
            self._lost[name] = member
        self._wake()

    def label(self, name: str, process: str) -> str:
        return f"{process}@{name}"

    # -- ScalingConnector

    async def scale(self, after: int | None = None) -> Scale:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _WAIT_S_MAX
        scale = await self._look()
        while after is not None and scale.sequence <= after and loop.time() < deadline_s:
            await self._news_within(deadline_s - loop.time())
            scale = await self._look()
        return scale

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        check_add(await self._look(), role, count, revision=revision)
        added: list[tuple[_Member, tuple[str, ...]]] = []
        with self._change(by):
            try:
                for member, share in self._shares(role, count):
                    add = partial(member.host.add, role, share, by=by)
                    added.append((member, await self._order(member, by, add)))
            except PenstockError:
                await self._take_back(added, by)
                raise
        return tuple(f"{name}@{member.name}" for member, names in added for name in names)

    async def retire(self, names: Sequence[str], *, by: str, revision: int | None = None) -> None:
        scale = await self._look()
        leaving = check_retire(scale, names, revision=revision)
        gone = {replica.name for replica in leaving}
        by_host: dict[str, list[str]] = {}
        for replica in leaving:
            process, _, host = replica.name.rpartition("@")
            by_host.setdefault(host, []).append(process)
        members = {name: self._member(name) for name in by_host}
        if not leaving:
            return
        with self._change(by):
            for index, (name, processes) in enumerate(by_host.items()):
                elsewhere = ready_roles(scale, gone, without=f"@{name}")
                retire = partial(members[name].host.retire, processes, by=by, elsewhere=elsewhere)
                try:
                    await self._order(members[name], by, retire)
                except PenstockError as error:
                    if index:
                        raise _AcceptedError(error) from error
                    raise

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        scale = await self._look()
        check_flip(scale, name, role, revision=revision)
        process, _, host = name.rpartition("@")
        member = self._member(host)
        elsewhere = ready_roles(scale, {name}, without=f"@{host}")
        with self._change(by):
            await self._order(
                member, by, partial(member.host.flip, process, role, by=by, elsewhere=elsewhere)
            )

    async def close(self) -> None:
        """Forget all hosts; what runs there stays."""
        self._members.clear()
        self._lost.clear()
        self._wake()

    # -- hosts

    def _begin(self) -> float:
        if self._begun_s is None:
            self._begun_s = asyncio.get_running_loop().time()
        return self._begun_s

    async def _look(self) -> Scale:
        """Ask all hosts, notice what others have changed there, and add up."""
        for member in tuple(self._members.values()):
            member.scale = await member.host.scale()
            if not member.pending and member.scale.revision != member.known:
                if member.scale.revision > member.known:
                    self._revision += 1
                    by, is_next = member.scale.changed_by, member.scale.revision == member.known + 1
                    is_late = is_next and by != "" and by == member.unanswered_by
                    self._changed_by = by if is_late else f"{by or 'somebody'} at {member.name}"
                member.known, member.unanswered_by = member.scale.revision, ""
        now_s = asyncio.get_running_loop().time()
        for member in tuple(self._lost.values()):
            if self._lost_for(member, now_s) >= self._hold_of(member):
                _log.warning("host_given_up", host=member.name, workers=len(member.scale.replicas))
                del self._lost[member.name]
                self.given_up(member.name)
        replicas = [
            replica
            for member in (*self._members.values(), *self._lost.values())
            if self._lost_for(member, now_s) < self._lost_after_s
            for replica in member.replicas()
        ]
        replicas.sort(key=lambda replica: replica.name)
        limits = self._limits(now_s)
        held = self._held(now_s)
        view = (
            [(each.name, each.role, each.state, each.phase) for each in replicas],
            [(each.role, each.room) for each in limits],
            sorted(self._lost),
            self._revision,
        )
        if view != self._view:
            self._view = view
            self._sequence += 1
        return Scale(
            sequence=self._sequence,
            revision=self._revision,
            changed_by=self._changed_by,
            replicas=tuple(replicas),
            limits=limits,
            held=held,
        )

    def _limits(self, now_s: float) -> tuple[RoleLimit, ...]:
        """Add up what each host has room for; hosts that do not answer have none."""
        found: dict[Role, list[tuple[str, RoleLimit]]] = {}
        for member in (*self._members.values(), *self._lost.values()):
            for limit in member.scale.limits:
                entries = found.setdefault(limit.role, [])
                if member.lost_s is None:
                    entries.append((member.name, limit))
        left_s = self._settle_s - (now_s - self._begin())
        made = []
        for role in sorted(found):
            limits = [limit for _, limit in found[role]]
            rooms = [limit.room for limit in limits]
            reasons = [f"{name}: {limit.why}" for name, limit in found[role] if limit.room == 0]
            more = f" and {len(reasons) - _REASONS_MAX} hosts more" if len(reasons) > _REASONS_MAX else ""
            room = None if None in rooms else sum(room for room in rooms if room is not None)
            why = "; ".join(reasons[:_REASONS_MAX]) + more or "no host that runs it is connected"
            if left_s > 0:
                room, why = 0, f"the planner has just begun; hosts have {left_s:.0f} s more to connect"
            starts_s = [limit.start_s for limit in limits if limit.start_s is not None]
            made.append(RoleLimit(role=role, room=room, why=why, start_s=max(starts_s, default=None)))
        return tuple(made)

    def _held(self, now_s: float) -> str:
        if self._settle_s - (now_s - self._begin()) > 0:
            return "the planner has just begun, and hosts may still connect"
        if not self._lost:
            return ""
        names = ", ".join(sorted(self._lost))
        longest_s = max(map(self._hold_of, self._lost.values()))
        return f"{names}: no answer, and it may still serve; nothing is taken away until it is back, or for {longest_s:.0f} s"

    def _hold_of(self, member: _Member) -> float:
        """Give how long nothing is taken away for a lost host; clients of its frontends, where it has nothing else, soon ask others."""
        return self._hold_s if member.scale.replicas else min(self._hold_s, _FRONTENDS_HOLD_S)

    def _shares(self, role: Role, count: int) -> list[tuple[_Member, int]]:
        """Choose hosts for new workers, one after another: where most room is left, then where fewest have the role."""
        rooms: dict[str, float] = {}
        have: dict[str, int] = {}
        for member in self._members.values():
            limit = next((each for each in member.scale.limits if each.role is role), None)
            if limit is not None and limit.room != 0:
                rooms[member.name] = float("inf") if limit.room is None else limit.room
                have[member.name] = len(member.scale.of(role))
        shares: dict[str, int] = {}
        for _ in range(count):
            name = max(rooms, key=lambda name: (rooms[name], -have[name], name))
            shares[name] = shares.get(name, 0) + 1
            rooms[name] -= 1
            have[name] += 1
        return [(self._members[name], share) for name, share in shares.items()]

    async def _take_back(self, added: Iterable[tuple[_Member, tuple[str, ...]]], by: str) -> None:
        """Retire workers that were added for a change that another host refused."""
        for member, names in added:
            try:
                await self._order(member, by, partial(member.host.retire, names, by=by))
            except PenstockError as error:
                _log.warning("workers_left", host=member.name, workers=names, error=error.message)

    @contextmanager
    def _change(self, by: str) -> Iterator[None]:
        """Count a change at once, so that nobody else's on the same revision is accepted; one that is refused does not count."""
        before = self._revision, self._changed_by
        self._revision += 1
        self._changed_by = by
        counted = self._revision
        try:
            yield
        except _AcceptedError as accepted:
            raise accepted.error from accepted.error.__cause__
        except PenstockError:
            if self._revision == counted:
                self._revision, self._changed_by = before
            raise
        finally:
            self._wake()

    async def _order(self, member: _Member, by: str, change: Callable[..., Awaitable[_T]]) -> _T:
        """Ask a host for a change on the revision that is known, and keep account of it.

        Raises:
            _AcceptedError: the host had accepted it before it failed.
            PenstockError: it was refused, or nobody knows.
        """
        member.pending += 1
        member.unanswered_by = ""
        try:
            made = await change(revision=member.known)
        except asyncio.CancelledError:
            member.known += 1  # a change of role goes on; if it was not accepted, the next look sees it
            raise
        except PenstockError as error:
            scale = await member.host.scale()
            if scale.revision == member.known + 1 and scale.changed_by == by:
                member.known += 1
                raise _AcceptedError(error) from error
            if isinstance(error, Unavailable):
                member.unanswered_by = by
            raise
        else:
            member.known += 1
            return made
        finally:
            member.pending -= 1

    def _member(self, name: str) -> _Member:
        if name not in self._members:
            raise conflict(f"{name} does not answer; its workers stay as they are until it does")
        return self._members[name]

    def _lost_for(self, member: _Member, now_s: float) -> float:
        return 0.0 if member.lost_s is None else now_s - member.lost_s

    async def _news_within(self, seconds: float) -> None:
        """Wait until some host has changed, or is new or gone."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news.add(news)
        try:
            async with asyncio.TaskGroup() as group:
                waits = [group.create_task(_wait(member)) for member in self._members.values()]
                await asyncio.wait([news, *waits], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
        finally:
            self._news.discard(news)

    def _wake(self) -> None:
        for news in self._news:
            if not news.done():
                news.set_result(None)


class _AcceptedError(Exception):
    """A host has accepted a change, which failed later, or at another host."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(error.message)
        self.error = error


async def _wait(member: _Member) -> None:
    await member.host.scale(member.scale.sequence)
