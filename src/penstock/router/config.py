"""Settings of the router and the dispatcher: how a worker is chosen, and the bounds of everything kept."""

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.core.types.location import Location
from penstock.perf.topology import Topology, Way
from penstock.router.policy.policies import check_policy_name, make_policy
from penstock.router.policy.session_affinity import SESSION_IDLE_S, SESSIONS_MAX
from penstock.seams import RoutingPolicy


class MigrationConfig(Config):
    """How requests go on elsewhere whose workers were lost. None is refused for how many there are: they go one after the other."""

    at_once: int = pydantic.Field(default=256, ge=1)
    """Requests of all workers together that may go on at once; further ones are put off."""
    spread_s: float = pydantic.Field(default=1.0, ge=0)
    """Within this time all go on that were put off when their workers were lost together; `at_once`, where that is more. 0: nobody is put off."""
    jitter_s: float = pydantic.Field(default=0.02, ge=0)
    """Each goes on after a random part of this besides."""
    backoff_s_max: float = pydantic.Field(default=5.0, ge=0)
    """A request that got next to nothing of the worker it had gone to before that was lost as well waits 0.1 s, doubled each time, up to this."""
    stalled_s_max: float = pydantic.Field(default=60.0, ge=0)
    """A request that has been losing workers for so long, next to no token between, ends with 503. Those that get on may lose as many workers as it takes."""


class RetryConfig(Config):
    """What happens to a request that a worker refuses, or whose workers are lost as they begin to compute it."""

    refusals_max: int = pydantic.Field(default=3, ge=0)
    """Times one request may be tried elsewhere because a worker refused it."""
    stale_routes_max: int = pydantic.Field(default=8, ge=0)
    """Times a worker may send one request back as other frontends' came there first, for a choice that knows of them; then it stays."""
    burst: int = pydantic.Field(default=1024, ge=1)
    """Refused requests of all together that may be tried elsewhere at once; past it the refusal is the answer."""
    per_s: float = pydantic.Field(default=10.0, ge=0)
    """Of these tries, earned back each second."""
    per_request: float = pydantic.Field(default=0.2, ge=0)
    """Of these tries, earned back with each request opened."""
    deaths_max: int = pydantic.Field(default=3, ge=1)
    """Workers lost, or steps failed, in a row as they began to compute one request, until its content is quarantined; before the last it goes on with no other suspect beside it."""
    quarantine_s: float = pydantic.Field(default=60.0, gt=0)
    """How long a content suspected of so many losses is refused."""
    quarantined_max: int = pydantic.Field(default=4096, ge=1)
    """Contents in quarantine at once; the oldest is let out first."""


class DisaggConfig(Config):
    """When a prompt is computed by a prefill worker, where there are any, and handed over to a decode worker."""

    remote_tokens_min: int = pydantic.Field(default=64, ge=1)
    """Prompts of which a decode worker lacks fewer tokens are computed there."""
    local_tokens_max: int | None = pydantic.Field(default=None, ge=0)
    """Prompts of which a decode worker lacks more tokens are computed by prefill workers, as long as one is there, however long they wait for it; None: whatever takes fewer seconds."""
    late_token_share: float = pydantic.Field(default=0.0, ge=0, le=1)
    """The part of the tokens of a decode worker's streams that may be late, as it computes a prompt that would have its first token in half the time there, whatever the two above say; only with policies that predict waits, such as `kv`."""
    kv_transfer_s: float = pydantic.Field(default=0.005, ge=0)
    """What a KV transfer takes beside moving bytes, in seconds."""
    link_bytes_per_s: float | None = pydantic.Field(default=None, gt=0)
    """How fast KV moves between any two workers; None is what `router.topology` says of where they are."""


class ExplainConfig(Config):
    """What is kept of decisions, for those who ask why."""

    decisions_max: int = pydantic.Field(default=4096, ge=0)
    """The latest decisions of a process that can be explained; 0 for none."""
    bytes_max: int = pydantic.Field(default=16 << 20, ge=1)
    """Memory for them, about: 1.5 KB for each with 8 workers, 80 KB with 1,000; then the oldest go sooner."""
    candidates_max: int = pydantic.Field(default=16, ge=2)
    """Workers that an explanation names, the cheapest first; it counts the others."""
    logged_share: float = pydantic.Field(default=1.0, ge=0, le=1)
    """Of the decisions, how many are logged with all that they went by, where the log level is debug."""


class QueueConfig(Config):
    """When requests wait at the router, and whose turn it is. Only policies that predict waits, such as `kv`, hold any."""

    threshold_s: float | None = pydantic.Field(default=2.0, gt=0)
    """A request waits here while each worker that may get it would have it wait longer than this, and has others waiting; None: never."""
    requests_max: int = pydantic.Field(default=2048, ge=2)
    """Requests of one model, or of one LoRA adapter, that wait at once, for prefill workers and for others each, past which come 503s; one tenant alone may have half, past which 429s."""
    work_weight: float = pydantic.Field(default=10.0, ge=0)
    """A second of predicted work counts as much as having come so many seconds later; 0: first come, first served."""
    overtaken_s_max: float = pydantic.Field(default=60.0, ge=0)
    """However much work it is, a request goes before those of its tenant that came so much later."""
    looked_at_max: int = pydantic.Field(default=8, ge=1)
    """So many of the first in turn are priced anew where there is room, and the first of those goes there."""
    priority_factor: float = pydantic.Field(default=4.0, ge=1)
    """How many times the share of the next lower priority one gets, while both have requests waiting."""


class RouterConfig(Config):
    """One frontend process's view of the workers, and its requests."""

    policy: str = "kv"
    """`kv` (fewest predicted seconds), `least-loaded`, `power-of-two`, `round-robin`, `random` or `session` (the session's worker, else as `kv`); or your own: an
    entry point's name of the group `penstock.policies`, or `package.module:Class`."""
    sessions_max: int = pydantic.Field(default=SESSIONS_MAX, ge=1)
    """For `session`: sessions remembered; past it the one unused for longest is forgotten."""
    session_idle_s: float = pydantic.Field(default=SESSION_IDLE_S, gt=0)
    """For `session`: how long one without requests is remembered."""
    busy_kv_share: float | None = pydantic.Field(default=None, gt=0, le=1)
    """A worker with more than this part of its KV blocks in use gets requests only if all are as busy; None is no limit."""
    busy_queued_tokens: int | None = pydantic.Field(default=None, ge=1)
    """A worker with more prompt tokens than this queued gets requests only if all are as busy; None is no limit."""
    workers_max: int = pydantic.Field(default=1024, ge=1)
    """Workers known at once; further ones are left out."""
    adapters_max: int = pydantic.Field(default=4096, ge=0)
    """LoRA adapters of one model known at once; requests for further ones find none."""
    indexed_blocks_max: int = pydantic.Field(default=16_777_216, ge=1)
    """(worker, block) pairs in the prefix index, however many workers there are: it has room for a million, and for twice the blocks that workers say they have. Past that, old leaves are forgotten."""
    predicted_s: float = pydantic.Field(default=120.0, gt=0)
    """How long a worker that sends no KV events is taken to hold what was sent to it last."""
    open_requests_max: int = pydantic.Field(default=16_384, ge=1)
    """Requests (choices) under way at once; the next one is refused with 503."""
    no_worker_wait_s: float = pydantic.Field(default=60.0, ge=0)
    """How long a request waits for a worker where its model has none."""
    connect_timeout_s: float = pydantic.Field(default=5.0, gt=0)
    """How long a worker may take to answer a new connection."""
    reconnect_s_max: float = pydantic.Field(default=5.0, gt=0)
    """The longest pause between two tries to reach a worker; it begins at a hundredth of this and doubles."""
    location: Location = Location()
    """Where this router runs; the environment of its process overrides it (`PENSTOCK_REGION`, `_ZONE`, `_RACK`, `_HOST`)."""
    topology: Topology = Topology()
    """What lies between locations, so that a far worker costs what it takes to reach it."""
    queue: QueueConfig = QueueConfig()
    """When requests wait here for a worker that has time, and whose turn it is."""
    migrations: MigrationConfig = MigrationConfig()
    """How requests go on elsewhere whose workers were lost."""
    retries: RetryConfig = RetryConfig()
    """What happens to a request that a worker refuses, or that may be why workers are lost."""
    disagg: DisaggConfig = DisaggConfig()
    """When prompts are computed by prefill workers."""
    explain: ExplainConfig = ExplainConfig()
    """What is kept of decisions, for those who ask why."""

    @pydantic.field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        try:
            check_policy_name(policy)
        except ConfigError as error:
            raise wrong(error.message.removeprefix("policy ")) from error
        return policy

    def kv_way(self, one: Location, other: Location) -> Way:
        """Say what lies between two workers for KV."""
        way, link_bytes_per_s = self.topology.way(one, other), self.disagg.link_bytes_per_s
        if link_bytes_per_s is None:
            return way
        return Way(latency_s=way.latency_s, bandwidth_bytes_per_s=link_bytes_per_s)

    def new_policy(self) -> RoutingPolicy:
        """Make the policy, with its settings."""
        return make_policy(self.policy, sessions_max=self.sessions_max, session_idle_s=self.session_idle_s)
