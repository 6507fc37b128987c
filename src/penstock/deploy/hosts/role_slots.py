"""The workers of a role in Kubernetes by the names that they keep, matched with the pods that are there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.core.log import get_logger
from penstock.core.types.instances import Replica, ReplicaState, Role, Scale
from penstock.deploy.hosts.host import Host
from penstock.runtime.kubernetes import Object

_log = get_logger()


@dataclass(slots=True, eq=False)
class Pod:
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
class Slot:
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
    slots: list[Slot] = field(default_factory=list)
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

    def fit(self, pods: Mapping[str, Pod], now_s: float) -> None:
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

    def ending(self, slots: Sequence[Slot]) -> list[Slot]:
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

    def _mark_leaving(self, pods: Mapping[str, Pod], staying: Sequence[Slot]) -> None:
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

    def _new_slot(self, now_s: float) -> Slot:
        used = {slot.name for slot in self.slots}
        name = next(f"{self.role}-{n}" for n in range(1, len(used) + 2) if f"{self.role}-{n}" not in used)
        slot = Slot(name, now_s)
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
