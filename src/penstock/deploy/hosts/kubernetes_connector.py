"""Scales a deployment of pods by the operator's PenstockRoles; pods' supervisors tell how their workers are."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.core.errors import Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import Replica, ReplicaState, Role, RoleLimit, Scale
from penstock.core.types.scaling_rules import (
    check_add,
    check_flip,
    check_retire,
    check_serving,
    conflict,
    ready_roles,
)
from penstock.deploy.hosts.connector import Host
from penstock.runtime.kubernetes import KubernetesClient, KubernetesError, Object, Resource

_log = get_logger()


@dataclass(slots=True, eq=False)
class RolePod:
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

    @property
    def serves(self) -> bool:
        serving = {ReplicaState.READY, ReplicaState.FLIPPING}
        return self.worker is not None and self.worker.state in serving


@dataclass(slots=True, eq=False)
class RoleSlot:
    """A worker by the name that it keeps, from before its pod is there; `pod` is None until one is.

    `is_leaving`: there are more pods than wanted, and this one is expected to end.
    """

    name: str
    since_s: float
    pod: str | None = None
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """What was asked of the API server without an answer; it may have come about."""

    spec: Object
    by: str


@dataclass(slots=True)
class RoleSlots:
    """What is known of one role.

    Attributes:
        body: its PenstockRole.
        generation: of the object that was seen, or written here, last.
        workload: name of its Deployment or StatefulSet.
        named: pods that were chosen to end first.
        unanswered: the last write, where its answer was lost.
    """

    role: Role
    workload: str
    body: Object
    generation: int
    named: set[str] = field(default_factory=set)
    slots: list[RoleSlot] = field(default_factory=list)
    start_s: float | None = None
    unanswered: Write | None = None

    @property
    def wanted(self) -> int:
        return int(self.body["spec"]["replicas"])

    @property
    def owner(self) -> str:
        return str((self.body.get("status") or {}).get("scaledBy") or "")

    def take(self, body: Object) -> str | None:
        """Take the role's object; returns who has changed the number meanwhile, None for nobody and for the number written here."""
        before, known = self.wanted, self.generation
        self.body, self.generation = body, int(body["metadata"].get("generation", 0))
        write, is_next = self.unanswered, self.generation == known + 1
        if self.generation == known:
            return None
        self.unanswered = None
        if (
            write is not None
            and is_next
            and all(body["spec"].get(key) == write.spec[key] for key in write.spec)
        ):
            self.named = set(write.spec["leaving"])
            return write.by
        if self.wanted == before:
            return None
        if len([slot for slot in self.slots if slot.pod is not None]) <= self.wanted:
            self.named.clear()  # they stay, and another may be the one to end next time
        return writer(body)

    def fit(self, pods: Mapping[str, RolePod], now_s: float) -> None:
        """Match workers' names with the pods that are there and those that are still to come.

        As many workers count as are wanted: pods beyond that end soon, as there are fewer wanted than before, or as a roll-out
        starts a new one before it ends an old one.
        """
        own = {name: pod for name, pod in pods.items() if pod.home is self.role}
        for slot in self.slots:
            if slot.pod is not None and slot.pod not in own:
                slot.pod, slot.since_s = None, now_s
        self.slots = [slot for slot in self.slots if slot.pod is not None or not slot.is_leaving]
        bound = {slot.pod for slot in self.slots}
        for name in sorted(own.keys() - bound):
            free = next((each for each in self.slots if each.pod is None), None)
            slot = free or self._new_slot(now_s)
            slot.pod = name
            _log.info("worker_has_pod", worker=slot.name, pod=name)
        self.named &= own.keys()
        staying = [slot for slot in self.slots if slot.pod is None or not own[slot.pod].ends]
        self._mark_leaving(own, staying)
        active = [slot for slot in staying if not slot.is_leaving]
        for slot in reversed([each for each in active if each.pod is None]):
            if len(active) > self.wanted:
                active.remove(slot)
                self.slots.remove(slot)
        for _ in range(self.wanted - len(active)):
            self._new_slot(now_s)

    def ending(self, slots: Sequence[RoleSlot]) -> list[RoleSlot]:
        """Give the workers that end instead of `slots`: a StatefulSet always ends its last pods, whatever they do."""
        ordinal = re.compile(rf"{re.escape(self.workload)}-(\d{{1,4}})")
        ordinals = {
            int(found[1]): slot
            for slot in self.slots
            if slot.pod is not None and (found := ordinal.fullmatch(slot.pod))
        }
        if not ordinals:
            return list(slots)
        absent = [slot for slot in self.slots if slot.pod is None]
        ends = []
        for number in range(self.wanted - 1, self.wanted - 1 - len(slots), -1):
            if (slot := ordinals.get(number)) is not None:
                ends.append(slot)
            elif absent:
                ends.append(absent.pop())
        return ends

    def leaving(self, replicas: int, chosen: Sequence[str]) -> list[str]:
        """Give the pods to name as those that end first, with so many wanted: `chosen`, and earlier ones that still have to end."""
        count = sum(slot.pod is not None for slot in self.slots)
        earlier = sorted(self.named - set(chosen))[: max(0, count - replicas - len(chosen))]
        return [*earlier, *chosen]

    def _mark_leaving(self, pods: Mapping[str, RolePod], staying: Sequence[RoleSlot]) -> None:
        """Choose which of too many pods are expected to end: those that were named, then those that do not serve yet, then the newest."""
        bound = [(index, slot) for index, slot in enumerate(staying) if slot.pod is not None]
        bound.sort(
            key=lambda each: (
                each[1].pod not in self.named,
                not each[1].is_leaving,
                pods[each[1].pod or ""].serves,
                -each[0],
            )
        )
        excess = max(0, len(bound) - self.wanted)
        for number, (_, slot) in enumerate(bound):
            slot.is_leaving = number < excess

    def _new_slot(self, now_s: float) -> RoleSlot:
        used = {slot.name for slot in self.slots}
        name = next(f"{self.role}-{n}" for n in range(1, len(used) + 2) if f"{self.role}-{n}" not in used)
        slot = RoleSlot(name, now_s)
        self.slots.append(slot)
        return slot


def writer(body: Object) -> str:
    """Give who has set a role's number last."""
    found: list[tuple[str, str]] = []
    managed: Sequence[Mapping[str, object]] = body["metadata"].get("managedFields") or ()
    for entry in managed:
        spec = msgspec.to_builtins(entry.get("fieldsV1") or {}).get("f:spec") or {}
        if "f:replicas" in spec:
            found.append((str(entry.get("time") or ""), str(entry.get("manager") or "")))
    return max(found, default=("", ""))[1] or "somebody"


GROUP, VERSION = "penstock.dev", "v1alpha1"
ROLES = Resource(GROUP, VERSION, "penstockroles", "PenstockRole")


_WAIT_S_MAX = 20.0
_POLL_S = 0.5
"""Between two looks of a caller that waits for a change: the API server is asked for each role."""
_ATTEMPTS = 3
_ROOM = 4096


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
        self.given_up: Callable[[str], None] = lambda _name: None
        self._client = client
        self._graph = graph
        self._names = tuple(roles)
        self._settle_s, self._lost_after_s, self._hold_s = settle_s, lost_after_s, hold_s
        self._begun_s: float | None = None
        self._roles: dict[Role, RoleSlots] = {}
        self._pods: dict[str, RolePod] = {}
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
        self._pods[name] = RolePod(name, host, scale, home)

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
            await asyncio.sleep(_POLL_S)
            scale = await self._look()
        return scale

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        async with self._lock:
            check_add(await self._look(), role, count, revision=revision)
            kept = self._roles[role]
            await self._write(kept, kept.wanted + count, (), by)
            before = {slot.name for slot in kept.slots}
            kept.fit(self._pods, asyncio.get_running_loop().time())
            return tuple(slot.name for slot in kept.slots if slot.name not in before)

    async def retire(self, names: Sequence[str], *, by: str, revision: int | None = None) -> None:
        async with self._lock:
            scale = await self._look()
            chosen: dict[Role, list[RoleSlot]] = {}
            for replica in check_retire(scale, names, revision=revision):
                kept, slot = self._slot_called(replica.name)
                chosen.setdefault(kept.role, []).append(slot)
            ending = {role: self._roles[role].ending(slots) for role, slots in chosen.items()}
            check_serving(scale, {slot.name for slots in ending.values() for slot in slots})
            for role in chosen:
                self._check_owner(role)
            for role, slots in chosen.items():
                kept = self._roles[role]
                pods = [slot.pod for slot in ending[role] if slot.pod is not None]
                await self._write(kept, kept.wanted - len(slots), pods, by)
                for slot in ending[role]:
                    slot.is_leaving = True
                kept.fit(self._pods, asyncio.get_running_loop().time())

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        async with self._lock:
            scale = await self._look()
            check_flip(scale, name, role, revision=revision)
            kept, slot = self._slot_called(name)
            self._check_owner(kept.role)
            self._check_owner(role)
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

    async def _look(self) -> Scale:
        """Ask the API server for numbers and pods for states, and match both.

        Raises:
            Unavailable: the API server does not answer.
        """
        now_s = asyncio.get_running_loop().time()
        if self._begun_s is None:
            self._begun_s = now_s
        for body in [await self._read(role) for role in self._names]:
            self._take(body)
        for pod in tuple(self._pods.values()):
            if pod.lost_s is None:
                pod.scale = await pod.host.scale()
            elif now_s - pod.lost_s >= self._lost_after_s:
                del self._pods[pod.name]
                self.given_up(pod.name)
        replicas = []
        for role in self._names:
            kept = self._roles[role]
            kept.fit(self._pods, now_s)
            replicas += [self._describe(kept, slot, now_s) for slot in kept.slots]
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

    def _take(self, body: Object) -> None:
        """Take a role's object, and note who else has changed its number."""
        role = Role(body["spec"]["role"])
        kept = self._roles.get(role)
        if kept is None:
            named = set(body["spec"].get("leaving") or ())
            generation = int(body["metadata"].get("generation", 0))
            self._roles[role] = RoleSlots(role, f"{self._graph}-{role}", body, generation, named)
        elif (by := kept.take(body)) is not None:
            self._accept(by)

    def _slot_of(self, pod: RolePod) -> RoleSlot | None:
        kept = None if pod.home is None else self._roles.get(pod.home)
        return None if kept is None else next((slot for slot in kept.slots if slot.pod == pod.name), None)

    def _slot_called(self, name: str) -> tuple[RoleSlots, RoleSlot]:
        return next((kept, slot) for kept in self._roles.values() for slot in kept.slots if slot.name == name)

    def _describe(self, kept: RoleSlots, slot: RoleSlot, now_s: float) -> Replica:
        pod = self._pods.get(slot.pod or "")
        worker = None if pod is None else pod.worker
        if worker is None:
            state = ReplicaState.STARTING if pod is None else ReplicaState.DRAINING
            return Replica(
                name=slot.name,
                role=kept.role,
                state=state,
                phase="waits for its pod",
                age_s=now_s - slot.since_s,
            )
        if worker.state is ReplicaState.READY and slot.since_s:
            kept.start_s = max(0.0, now_s - worker.age_s - slot.since_s) or kept.start_s
            slot.since_s = 0.0
        changed: dict[str, object] = {}
        if slot.is_leaving and worker.state is not ReplicaState.DRAINING:
            changed = {
                "state": ReplicaState.DRAINING,
                "phase": "one of more pods than are wanted, which end soon",
            }
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

    def _check_owner(self, role: Role) -> None:
        if (kept := self._roles.get(role)) is not None and kept.owner:
            raise conflict(f"{role}: {kept.owner} decides how many there are")

    async def _write(self, kept: RoleSlots, replicas: int, chosen: Sequence[str], by: str) -> None:
        """Set a role's number, and which pods end first, in one write, unless somebody else has changed it.

        Raises:
            RequestError: somebody else has, or the API server refuses.
            Unavailable: its answer was lost; the next look tells whether it was done.
        """
        spec: Object = {"replicas": replicas, "leaving": kept.leaving(replicas, chosen)}
        for attempt in range(_ATTEMPTS):
            change = {"metadata": {"resourceVersion": kept.body["metadata"]["resourceVersion"]}, "spec": spec}
            kept.unanswered = Write(spec=spec, by=by)
            try:
                body = await self._client.patch(ROLES, kept.body["metadata"]["name"], change)
            except KubernetesError as error:
                if error.status >= 500:
                    raise
                kept.unanswered = None
                live = await self._read(kept.role)
                is_status = int(live["metadata"].get("generation", 0)) == kept.generation
                if error.status != 409 or not is_status or attempt + 1 == _ATTEMPTS:
                    raise conflict(f"{kept.role}: not scaled: {error.message}") from error
                kept.body = live
            else:
                kept.body, kept.generation = body, int(body["metadata"].get("generation", 0))
                kept.named, kept.unanswered = set(spec["leaving"]), None
                break
        self._accept(by)

    def _accept(self, by: str) -> None:
        self._revision += 1
        self._changed_by = by


_ROOM = 4096
