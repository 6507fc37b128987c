"""A worker's registration: its role, its engine, its prices, and the changes that discovery reports."""

from enum import StrEnum
from typing import Self

import msgspec
import pydantic

from penstock.core.config import Config, wrong
from penstock.core.ids import WorkerId
from penstock.core.types.events import Holder
from penstock.core.types.kv import KvExchange, KvLayout
from penstock.core.types.requests import MediaKind
from penstock.core.wire import Wire

CHAT_TEMPLATE = "chat_template.jinja"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE, "chat_template.json")
ADDITIONAL_TEMPLATES = "additional_chat_templates/"
"""Folder of a model's chat templates for other uses, each NAME.jinja."""


class CardFile(Wire, frozen=True):
    """A file of a model card, fetched from any worker of the model by its content hash."""

    name: str
    sha256: str
    size_bytes: int

    @property
    def makes_text(self) -> bool:
        """Whether the model's prompts and the texts of its answers depend on the file."""
        return self.name in TEXT_FILES or self.name.startswith(ADDITIONAL_TEMPLATES)


class ModelCard(Wire, frozen=True):
    """What a frontend on another host needs to serve a model; the files come over the request plane.

    Attributes:
        salt: start of every block-hash chain: model revision and KV dtype.
        default_sampling: the model's own (name, value) defaults, such as temperature.
        parent: base model of a LoRA adapter; None for a base model.
        media: what its engine takes besides text.
    """

    name: str
    context_length: int
    block_size: int
    salt: bytes
    eos_token_ids: tuple[int, ...] = ()
    files: tuple[CardFile, ...] = ()
    created_s: int = 0
    default_sampling: tuple[tuple[str, float], ...] = ()
    parent: str | None = None
    media: tuple[MediaKind, ...] = ()

    def adapted(self, adapter: str) -> "ModelCard":
        """Make the card of a LoRA adapter of this model. Its KV differs, so its `salt` differs too."""
        name = adapter.encode()
        salt = self.salt + b"|adapter=%d:" % len(name) + name
        return msgspec.structs.replace(self, name=adapter, parent=self.name, salt=salt)

    def salted(self, cache_salt: str) -> "ModelCard":
        """Make the card for requests of one tenant, which share no KV with others; a client's own `cache_salt` comes after it."""
        return msgspec.structs.replace(self, salt=request_salt(self.salt, cache_salt))


CLIENT_SALT = b"|cache_salt="
"""Stands before the client's `cache_salt` in `Request.salt`."""


def request_salt(card_salt: bytes, cache_salt: str | None) -> bytes:
    """Combine a card's salt with a request's `cache_salt`: requests with different salts share no blocks."""
    return card_salt if cache_salt is None else card_salt + CLIENT_SALT + cache_salt.encode()


class Role(StrEnum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class KvHolder(Wire, frozen=True):
    """A keeper of KV blocks that several workers load: a host's arena, or an object store.

    Attributes:
        kind: which of them.
        id: the same of all workers that load the same blocks from it.
        blocks: that it may keep, as far as this worker knows.
    """

    kind: Holder
    id: str
    blocks: int = 0


OPTIONAL_SAMPLING = ("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs")
"""Fields of `SamplingParams` that not every engine has."""


class EngineInfo(Wire, frozen=True):
    """What an engine reports of itself once started. With `data_parallel` > 1 sizes are those of one rank.

    Attributes:
        data_parallel: ranks with a queue, a batch and KV of their own; routers choose among ranks as among workers.
        kv_events: whether it sends KV events; if not, routers predict its prefix cache from the requests they sent.
        prompts_at_once: prompts computed in parallel without slowing each other: the ranks of an engine whose ranks routers do not see.
        kv_layout: where KV lies in memory; None for an engine without KV memory.
        kv_by_chunk: whether full blocks enter the prefix cache after the step that computed them, and `Step.prefilling` is set.
        announces: whether its worker sends an empty `Delta` before the first step that computes a request.
        lower_tier_blocks: blocks in the worker's own tiers below the device.
        kv_holders: what it loads from beside these; KV events of each are sent to whoever subscribes to it.
        transferred_prompts_only: whether its decode workers compute no prompts; routers then give each one to a prefill worker.
        media: what it takes besides text; its worker refuses requests with anything else.
        embedding_size: values of an embedding (`Request.embeds`); 0: it makes none, and its worker refuses such requests.
        structured_outputs: whether it keeps to `SamplingParams.structured`; if not, its worker refuses such requests.
        interleaves_tenants: whether a prompt overtakes those that the engine has begun, where its tenant was served less or it is shorter.
        is_deployment: whether it is another deployment, whose router chooses the worker; it gets no forwarded request.
        sampling_fields: which of `OPTIONAL_SAMPLING` it heeds; its worker refuses requests with the others.
    """

    block_size: int
    total_blocks: int
    context_length: int
    max_batch_tokens: int
    max_running_requests: int
    kv_bytes_per_block: int = 0
    kv_events: bool = True
    prompts_at_once: int = 1
    kv_layout: KvLayout | None = None
    kv_by_chunk: bool = False
    announces: bool = False
    lower_tier_blocks: int = 0
    structured_outputs: bool = False
    transferred_prompts_only: bool = False
    media: tuple[MediaKind, ...] = ()
    data_parallel: int = 1
    kv_holders: tuple[KvHolder, ...] = ()
    embedding_size: int = 0
    sampling_fields: tuple[str, ...] = ()
    is_deployment: bool = False
    interleaves_tenants: bool = False


class Prices(Wire, frozen=True):
    """Seconds of an engine's work, for a router that knows neither its hardware nor its model.

    Prefill of n tokens after m cached ones: `prefill_step_s` + n `prefill_token_s` + (n m + n (n + 1) / 2)
    `prefill_pair_s`. A decode step of b sequences with c tokens of context in all: `decode_step_s` +
    b `decode_sequence_s` + c `decode_token_s`.

    Attributes:
        onboard_token_s: seconds to bring one token's KV into the device from each `Tier`, the device first.
        error: mean relative error of these prices against the latency model that they approximate.
    """

    prefill_step_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_step_s: float
    decode_sequence_s: float
    decode_token_s: float
    onboard_token_s: tuple[float, ...] = ()
    error: float = 0.0


class Distance(Wire, frozen=True):
    """The way to a worker: seconds one way, and the bandwidth of one connection."""

    latency_s: float
    bandwidth_bytes_per_s: float


class InstanceState(StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    ASLEEP = "asleep"  # has given up its memory, takes nothing until it wakes


class Instance(Wire, frozen=True):
    """A worker's registration; it lives as long as its lease.

    Attributes:
        host: where it runs, as far as is known; likewise `rack`, `zone`, `region`.
        prices: None without a profile or latency model of the engine.
        adapters: LoRA adapters that it serves, loaded already or on first use.
        exchange: None for a worker without KV transfer.
        problem: why its engine cannot serve for now; empty while it can.
        rank: the data-parallel rank that a router's connection is for; 0 in registrations.
        registered_id: of a rank, the id of its worker's registration.
        distance: of a link, the way to the other region; None: routers know it by their topology.
    """

    worker_id: WorkerId
    name: str
    address: str
    role: Role
    card: ModelCard
    engine: EngineInfo
    state: InstanceState = InstanceState.READY
    pid: int = 0
    host: str = ""
    prices: Prices | None = None
    adapters: tuple[str, ...] = ()
    rack: str = ""
    zone: str = ""
    region: str = ""
    exchange: KvExchange | None = None
    problem: str = ""
    rank: int = 0
    registered_id: WorkerId | None = None
    distance: Distance | None = None

    @property
    def registration(self) -> WorkerId:
        """The id under which its worker is registered."""
        return self.worker_id if self.registered_id is None else self.registered_id

    @property
    def worker(self) -> str:
        """The name under which its worker is registered."""
        return self.name if self.registered_id is None else self.name.rpartition("/")[0]


class InstancePut(Wire, frozen=True, tag="put"):
    """An instance is present, or changed."""

    instance: Instance


class InstanceRemoved(Wire, frozen=True, tag="removed"):
    worker_id: WorkerId
    reason: str = ""


class WatchSynced(Wire, frozen=True, tag="synced"):
    """All instances present when the watch began have been reported; changes follow."""


InstanceChange = InstancePut | InstanceRemoved | WatchSynced


LABEL_LENGTH_MAX = 253
"""As of a name of DNS."""


def label_problem(name: str, *, is_host: bool) -> str:
    """Say why a label cannot be used; empty if it can. Workers are named `worker-1@HOST`, so a host has no '@'."""
    if len(name) > LABEL_LENGTH_MAX or not name.isprintable() or (is_host and "@" in name):
        without = " without '@'" if is_host else ""
        return f"must be a printable name of up to {LABEL_LENGTH_MAX} characters{without}, got {name[:80]!r}"
    return ""


class Location(Config):
    """A host and its rack, zone and region; an empty label counts as equal to the other side's."""

    host: str = ""
    """The machine."""
    rack: str = ""
    """Machines behind one switch."""
    zone: str = ""
    """Racks in one building or campus."""
    region: str = ""
    """Zones with fast links between them."""

    @pydantic.field_validator("host", "rack", "zone", "region")
    @classmethod
    def _check_label(cls, name: str, field: pydantic.ValidationInfo) -> str:
        if problem := label_problem(name, is_host=field.field_name == "host"):
            raise wrong(problem)
        return name

    @classmethod
    def of(cls, instance: Instance) -> Self:
        """Return the location that a worker has registered."""
        return cls(host=instance.host, rack=instance.rack, zone=instance.zone, region=instance.region)


class ReplicaState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    FLIPPING = "flipping"
    DRAINING = "draining"
    FAILED = "failed"


class Replica(Wire, frozen=True):
    """One worker.

    Attributes:
        role: the role that it has, or gets where it is flipping.
        phase: what it does while it is no worker that serves, such as `loads the engine`.
        age_s: seconds since its process began to start, or since it was ready.
        devices: indices of its devices on its machine.
        core: the CPU core of its engine; None without one of its own.
        template: the same of workers that were started with the same settings and model.
    """

    name: str
    role: Role
    state: ReplicaState
    phase: str = ""
    age_s: float = 0.0
    devices: tuple[int, ...] = ()
    core: int | None = None
    template: str = ""


class RoleLimit(Wire, frozen=True):
    """How many more workers a role may get.

    Attributes:
        room: workers that may be added now; None is no known limit.
        why: what limits them, with the fix.
        start_s: seconds that the last start of such a worker took; None before the first.
        owner: who else decides how many workers the role has, such as an autoscaler; empty is nobody.
    """

    role: Role
    room: int | None = None
    why: str = ""
    start_s: float | None = None
    owner: str = ""


class Scale(Wire, frozen=True):
    """The workers of a deployment at one moment.

    Attributes:
        sequence: grows with every change of a replica's state.
        revision: grows with every accepted `add`, `retire` and `flip`. A caller that gives the revision it has seen is
            refused if somebody else was faster.
        changed_by: who asked for the last of them; empty is the graph.
        replicas: in the order of their names; those that drain included.
        held: why no worker may leave or change its role now; empty where they may.
    """

    sequence: int
    revision: int
    changed_by: str = ""
    replicas: tuple[Replica, ...] = ()
    limits: tuple[RoleLimit, ...] = ()
    held: str = ""

    def of(self, role: Role) -> tuple[Replica, ...]:
        """Give the workers that have or get a role, without those that drain."""
        return tuple(
            replica
            for replica in self.replicas
            if replica.role is role and replica.state is not ReplicaState.DRAINING
        )

    def to_retire(self, role: Role, count: int) -> tuple[str, ...]:
        """Choose `count` workers of a role whose end costs least: failed, then starting, then the newest."""
        order = {ReplicaState.FAILED: 0, ReplicaState.STARTING: 1}
        chosen = sorted(self.of(role), key=lambda replica: (order.get(replica.state, 2), replica.age_s))
        return tuple(replica.name for replica in chosen[:count])


class BecomeRole(Wire, frozen=True, tag="role"):
    """Finish current requests, then register with another role."""

    role: Role


class Sleep(Wire, frozen=True, tag="sleep"):
    """Finish current requests, then give up the engine's memory. `level` is vLLM's: 1 keeps the weights in host memory, 2 drops them."""

    level: int


class WakeUp(Wire, frozen=True, tag="wake_up"):
    """Take the memory again, and requests."""


WorkerChange = BecomeRole | Sleep | WakeUp
