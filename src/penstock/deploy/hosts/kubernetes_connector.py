"""Scales a deployment of pods by the operator's PenstockRoles; pods' supervisors tell how their workers are."""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.core.errors import RequestError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import Role
from penstock.core.types.scaling import Replica, ReplicaState, RoleLimit, Scale
from penstock.deploy.hosts.checks import check_serving, conflict, find, ready_roles
from penstock.deploy.hosts.host import Host
from penstock.deploy.hosts.roles import ROLES
from penstock.runtime.kubernetes.client import KubernetesClient, KubernetesError, Object

_WAIT_S_MAX = 20.0
_POLL_S = 1.0
_ATTEMPTS = 3
_log = get_logger()


@dataclass(slots=True, eq=False)
class _Pod:
    """A pod whose supervisor is connected, or was lost a moment ago; `home` is the role that it is a pod of."""

    name: str
    host: Host
    scale: Scale
    home: Role | None
    lost_s: float | None = None

    @property
    def worker(self) -> Replica | None:
        """Its worker; None of frontends, and of a pod whose worker has ended."""
        return next(iter(self.scale.replicas), None)

    @property
    def ends(self) -> bool:
        """Whether it drains, as one that was told to end."""
        return self.home is not None and (self.worker is None or self.worker.state is ReplicaState.DRAINING)


@dataclass(slots=True, eq=False)
class _Slot:
    """A worker by the name that it keeps, from before its pod is there; `pod` is None until one is."""

    name: str
    since_s: float
    pod: str | None = None
    is_leaving: bool = False


@dataclass(slots=True)
class _Kept:
    """What is known of one role."""

    body: Object
    generation: int
    slots: list[_Slot] = field(default_factory=list)
    start_s: float | None = None

    @property
    def wanted(self) -> int:
        return int(self.body["spec"]["replicas"])

    @property
    def owner(self) -> str:
        return str((self.body.get("status") or {}).get("scaledBy") or "")


class KubernetesConnector:
    """A `seams.ScalingConnector` of one PenstockGraph. Workers are called `ROLE-NUMBER`. One event loop owns it.

    Numbers are those of the PenstockRoles; how workers are is what pods tell. An API server that does not answer fails every call, so
    that nothing is scaled by what was true once. Roles that an autoscaler owns are only shown.
    """

    def __init__(
        self,
        client: KubernetesClient,
        graph: str,
        roles: Iterable[Role],
        *,
        settle_s: float = 15.0,
        lost_after_s: float = 15.0,
        hold_s: float = 60.0,
    ) -> None:
        """Know nothing yet.

        Args:
            client: entered; the caller closes it.
            graph: name of the PenstockGraph.
            roles: of the graph.
            settle_s: nothing changes for so long, in which pods connect to a planner that was started.
            lost_after_s: the worker of a pod that does not answer counts for so long; then the role waits for another pod.
            hold_s: while a pod was lost less than so long ago, no worker leaves or changes its role.
        """
        self._client = client
        self._graph = graph
        self._names = tuple(roles)
        self._settle_s, self._lost_after_s, self._hold_s = settle_s, lost_after_s, hold_s
        self._begun_s: float | None = None
        self._roles: dict[Role, _Kept] = {}
        self._pods: dict[str, _Pod] = {}
        self._lost_s: float | None = None
        """When a pod was lost last."""
        self._lock = asyncio.Lock()
        self._sequence = 0
        self._revision = 0
        self._changed_by = ""
        self._view: object = None

    # -- Hosts

    def join(self, name: str, host: Host, scale: Scale) -> None:
        home = scale.limits[0].role if scale.limits else None
        self._pods[name] = _Pod(name, host, scale, home)

    def leave(self, name: str, *, on_purpose: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if on_purpose:
            self._pods.pop(name, None)
        elif name in self._pods:
            self._pods[name].lost_s = self._lost_s = now_s

    def label(self, name: str, process: str) -> str:
        """Give the worker's name if the pod has one already; it is asked for with each window."""
        pod = self._pods.get(name)
        if pod is not None and pod.home is not None and (slot := self._slot_of(pod)) is not None:
            return slot.name
        return f"{process}@{name}"

    # -- ScalingConnector

    async def scale(self, after: int | None = None) -> Scale:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _WAIT_S_MAX
        scale = await self._look()
        while after is not None and scale.sequence <= after and loop.time() < deadline_s:
            await asyncio.sleep(_POLL_S / 10)
            scale = await self._look()
        return scale

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        async with self._lock:
            scale = await self._seen(revision)
            limit = next((each for each in scale.limits if each.role is role), None)
            if limit is None:
                raise RequestError(
                    f"role {role} is not of {self._graph}, which has {', '.join(self._names)}",
                    http_status=404,
                )
            if count < 1:
                raise RequestError(f"count: must be >= 1, got {count}")
            if limit.room is not None and count > limit.room:
                raise conflict(f"{role}: {count} more cannot be added, {limit.room} can: {limit.why}")
            kept = self._roles[role]
            await self._write(role, kept.wanted + count, (), by)
            before = {slot.name for slot in kept.slots}
            self._fit(role, kept)
            return tuple(slot.name for slot in kept.slots if slot.name not in before)

    async def retire(self, names: Sequence[str], *, by: str, revision: int | None = None) -> None:
        async with self._lock:
            scale = await self._seen(revision)
            leaving = [find(scale, name) for name in dict.fromkeys(names)]
            for replica in leaving:
                if replica.state is ReplicaState.DRAINING:
                    raise conflict(f"{replica.name} drains already; it ends by itself")
            check_serving(scale, {replica.name for replica in leaving})
            if scale.held:
                raise conflict(scale.held)
            chosen: dict[Role, list[_Slot]] = {}
            for replica in leaving:
                role, slot = self._slot_called(replica.name)
                chosen.setdefault(role, []).append(slot)
            for role in chosen:
                if owner := self._roles[role].owner:
                    raise conflict(f"{role}: {owner} decides how many there are")
            for role, slots in chosen.items():
                kept = self._roles[role]
                ending = self._ending(role, kept, slots)
                pods = [slot.pod for slot in ending if slot.pod is not None]
                await self._write(role, kept.wanted - len(ending), pods, by)
                for slot in ending:
                    slot.is_leaving = True
                self._fit(role, kept)

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        async with self._lock:
            scale = await self._seen(revision)
            replica = find(scale, name)
            if replica.state is not ReplicaState.READY:
                raise conflict(
                    f"{name} is not ready: {replica.phase or replica.state}; choose another worker"
                )
            if replica.role is role:
                raise conflict(f"{name} is {role} already; choose another role")
            if role is Role.PREFILL:
                check_serving(scale, {name})
            if scale.held:
                raise conflict(scale.held)
            _, slot = self._slot_called(name)
            pod = self._pods.get(slot.pod or "")
            if pod is None or pod.worker is None or pod.lost_s is not None:
                raise conflict(f"{name} does not answer; choose another worker")
            self._accept(by)
            process, elsewhere = pod.worker.name, ready_roles(scale, {name})
        await pod.host.flip(process, role, by=by, elsewhere=elsewhere)

    async def close(self) -> None:
        """Forget all pods; what runs stays."""
        self._pods.clear()

    # -- looking

    async def _seen(self, revision: int | None) -> Scale:
        """Look, and check that nobody else was faster than a caller with `revision`."""
        scale = await self._look()
        if revision is not None and revision != self._revision:
            raise conflict(
                f"revision: {self._changed_by or 'somebody'} has scaled meanwhile (revision {self._revision}, expected"
                f" {revision}); look again and repeat"
            )
        return scale

    async def _look(self) -> Scale:
        """Ask the API server for numbers and pods for states, and match both.

        Raises:
            Unavailable: the API server does not answer.
        """
        now_s = asyncio.get_running_loop().time()
        if self._begun_s is None:
            self._begun_s = now_s
        for role in self._names:
            self._take(role, await self._read(role))
        for pod in tuple(self._pods.values()):
            if pod.lost_s is None:
                pod.scale = await pod.host.scale()
            elif now_s - pod.lost_s >= self._lost_after_s:
                del self._pods[pod.name]
        replicas = []
        for role in self._names:
            kept = self._roles[role]
            self._fit(role, kept)
            replicas += [self._describe(role, kept, slot, now_s) for slot in kept.slots]
        held = self._held(now_s)
        limits = tuple(self._limit(role, now_s) for role in self._names)
        view = (
            [(each.name, each.role, each.state) for each in replicas],
            [(each.room, each.owner) for each in limits], bool(held), self._revision,
        )  # fmt: skip
        if view != self._view:
            self._view = view
            self._sequence += 1
        return Scale(
            sequence=self._sequence, revision=self._revision, changed_by=self._changed_by,
            replicas=tuple(sorted(replicas, key=lambda each: each.name)), limits=limits, held=held,
        )  # fmt: skip

    async def _read(self, role: Role) -> Object:
        name = f"{self._graph}-{role}"
        try:
            return await self._client.get(ROLES, name)
        except KubernetesError as error:
            if error.status == 404:
                raise Unavailable(f"PenstockRole {name} is not there yet; the operator makes it") from error
            raise

    def _take(self, role: Role, body: Object) -> None:
        """Take a role's object; somebody else has changed it if its generation has grown."""
        generation = int(body["metadata"].get("generation", 0))
        kept = self._roles.get(role)
        if kept is None:
            self._roles[role] = _Kept(body, generation)
            return
        if generation != kept.generation and int(body["spec"]["replicas"]) != kept.wanted:
            self._revision += 1
            self._changed_by = _writer(body)
        kept.body, kept.generation = body, generation

    def _fit(self, role: Role, kept: _Kept) -> None:
        """Match workers' names with the pods that are there and those that are still to come."""
        now_s = asyncio.get_running_loop().time()
        pods = {pod.name: pod for pod in self._pods.values() if pod.home is role}
        for slot in kept.slots:
            if slot.pod is not None and slot.pod not in pods:
                slot.pod, slot.since_s = None, now_s
        kept.slots = [slot for slot in kept.slots if slot.pod is not None or not slot.is_leaving]
        bound = {slot.pod for slot in kept.slots}
        for name in sorted(pods.keys() - bound):
            free = next((each for each in kept.slots if each.pod is None), None)
            slot = free or self._new_slot(role, kept, now_s)
            slot.pod = name
            _log.info("worker_has_pod", worker=slot.name, pod=name)
        named = set(kept.body["spec"].get("leaving") or ())
        staying = [slot for slot in kept.slots if not self._ends(slot)]
        excess = max(0, len([slot for slot in staying if slot.pod is not None]) - kept.wanted)
        for slot in staying:
            slot.is_leaving = excess > 0 and slot.pod is not None and (slot.is_leaving or slot.pod in named)
            excess -= slot.is_leaving
        active = [slot for slot in staying if not slot.is_leaving]
        for slot in reversed([each for each in active if each.pod is None]):
            if len(active) > kept.wanted:
                active.remove(slot)
                kept.slots.remove(slot)
        for _ in range(kept.wanted - len(active)):
            self._new_slot(role, kept, now_s)

    def _new_slot(self, role: Role, kept: _Kept, now_s: float) -> _Slot:
        used = {slot.name for slot in kept.slots}
        name = next(f"{role}-{n}" for n in range(1, len(used) + 2) if f"{role}-{n}" not in used)
        slot = _Slot(name, now_s)
        kept.slots.append(slot)
        return slot

    def _ends(self, slot: _Slot) -> bool:
        pod = self._pods.get(slot.pod or "")
        return pod is not None and pod.ends

    def _slot_of(self, pod: _Pod) -> _Slot | None:
        kept = None if pod.home is None else self._roles.get(pod.home)
        return None if kept is None else next((slot for slot in kept.slots if slot.pod == pod.name), None)

    def _slot_called(self, name: str) -> tuple[Role, _Slot]:
        return next(
            (role, slot) for role, kept in self._roles.items() for slot in kept.slots if slot.name == name
        )

    def _describe(self, role: Role, kept: _Kept, slot: _Slot, now_s: float) -> Replica:
        pod = self._pods.get(slot.pod or "")
        worker = None if pod is None else pod.worker
        if worker is None:
            state = ReplicaState.STARTING if pod is None else ReplicaState.DRAINING
            return Replica(
                name=slot.name, role=role, state=state, phase="waits for its pod", age_s=now_s - slot.since_s
            )
        if worker.state is ReplicaState.READY and slot.since_s:
            kept.start_s = max(0.0, now_s - worker.age_s - slot.since_s) or kept.start_s
            slot.since_s = 0.0
        changed = {"state": ReplicaState.DRAINING} if slot.is_leaving else {}
        return msgspec.structs.replace(worker, name=slot.name, **changed)

    def _limit(self, role: Role, now_s: float) -> RoleLimit:
        kept = self._roles[role]
        room, why = None, ""
        if kept.owner:
            room, why = 0, f"{kept.owner} decides how many there are"
        elif self._settles_for(now_s) > 0:
            room, why = (
                0,
                f"the planner has just begun; pods have {self._settles_for(now_s):.0f} s more to connect",
            )
        else:
            room, why = _ROOM - kept.wanted, f"at most {_ROOM} pods of a role"
        return RoleLimit(role=role, room=max(0, room), why=why, start_s=kept.start_s, owner=kept.owner)

    def _held(self, now_s: float) -> str:
        if self._settles_for(now_s) > 0:
            return "the planner has just begun, and pods may still connect"
        if self._lost_s is not None and now_s - self._lost_s < self._hold_s:
            return f"a pod was lost; nothing is taken away for {self._hold_s:.0f} s"
        return ""

    def _settles_for(self, now_s: float) -> float:
        return self._settle_s - (now_s - (now_s if self._begun_s is None else self._begun_s))

    # -- writing

    def _ending(self, role: Role, kept: _Kept, slots: list[_Slot]) -> list[_Slot]:
        """Give the workers that end instead of `slots`: a StatefulSet always ends its last pods."""
        ordinal = re.compile(rf"{re.escape(self._graph)}-{role}-(\d{{1,4}})")
        ordinals = {
            slot: int(found[1])
            for slot in kept.slots
            if slot.pod is not None and not slot.is_leaving and (found := ordinal.fullmatch(slot.pod))
        }
        bound = [slot for slot in slots if slot.pod is not None]
        if not bound or not all(slot in ordinals for slot in bound):
            return slots
        last = sorted(ordinals, key=lambda slot: -ordinals[slot])[: len(bound)]
        return [*(slot for slot in slots if slot.pod is None), *last]

    async def _write(self, role: Role, replicas: int, leaving: Sequence[str], by: str) -> None:
        """Set a role's number, and which pods end first, in one write, unless somebody else has changed it."""
        kept = self._roles[role]
        before = [name for name in kept.body["spec"].get("leaving") or () if name in self._pods]
        change: Object = {"spec": {"replicas": replicas, "leaving": list(dict.fromkeys([*before, *leaving]))}}
        for attempt in range(_ATTEMPTS):
            change["metadata"] = {"resourceVersion": kept.body["metadata"]["resourceVersion"]}
            try:
                body = await self._client.patch(ROLES, kept.body["metadata"]["name"], change)
            except KubernetesError as error:
                live = await self._read(role)
                is_status = int(live["metadata"].get("generation", 0)) == kept.generation
                if error.status != 409 or not is_status or attempt + 1 == _ATTEMPTS:
                    raise conflict(f"{role}: not scaled: {error.message}") from error
                kept.body = live
            else:
                kept.body, kept.generation = body, int(body["metadata"].get("generation", 0))
                break
        self._accept(by)

    def _accept(self, by: str) -> None:
        self._revision += 1
        self._changed_by = by


_ROOM = 4096


def _writer(body: Object) -> str:
    """Give who has set a role's number last."""
    found: list[tuple[str, str]] = []
    managed: Sequence[Mapping[str, object]] = body["metadata"].get("managedFields") or ()
    for entry in managed:
        spec = msgspec.to_builtins(entry.get("fieldsV1") or {}).get("f:spec") or {}
        if "f:replicas" in spec:
            found.append((str(entry.get("time") or ""), str(entry.get("manager") or "")))
    return max(found, default=("", ""))[1] or "somebody"
