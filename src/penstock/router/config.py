"""Settings of the router and the dispatcher: how workers are chosen, and bounds."""

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Location
from penstock.perf.topology import NetworkPath, Topology
from penstock.router.policies import SESSION_IDLE_S, SESSIONS_MAX, check_policy_name, make_policy
from penstock.seams import RoutingPolicy


class MigrationConfig(Config):
    """How requests of lost workers go on elsewhere. None is refused; past `at_once` they go one after the other."""

    at_once: int = pydantic.Field(default=256, ge=1)
    """Requests that go on at once, over all workers; further ones wait."""
    spread_s: float = pydantic.Field(default=1.0, ge=0)
    """Requests that wait go on within this time, or at `at_once` in this time where that is slower. 0: none waits."""
    jitter_s: float = pydantic.Field(default=0.02, ge=0)
    """Each waits a random part of this besides."""
    backoff_s_max: float = pydantic.Field(default=5.0, ge=0)
    """A request that made no progress since its last move waits 0.1 s, doubled each time, up to this."""
    stalled_s_max: float = pydantic.Field(default=60.0, ge=0)
    """A request that has lost workers for so long without progress ends with 503. A request that makes progress may lose any number of workers."""


class RetryConfig(Config):
    """What happens to a request that workers refuse, or that may be why workers are lost."""

    refusals_max: int = pydantic.Field(default=3, ge=0)
    """Times that one refused request is tried elsewhere."""
    unavailable_max: int = pydantic.Field(default=8, ge=0)
    """Times that a request without a token is tried again, at a worker that has not failed it where there is one, after workers could not serve it for now. One with tokens is bounded by `migrations.stalled_s_max`."""
    stale_routes_max: int = pydantic.Field(default=8, ge=0)
    """Times that workers may return one request because other frontends' requests arrived first; then it stays."""
    burst: int = pydantic.Field(default=1024, ge=1)
    """Retries of refused requests in the budget of a frontend; past it the refusal is the answer."""
    per_s: float = pydantic.Field(default=10.0, ge=0)
    """Retries earned back each second."""
    per_request: float = pydantic.Field(default=0.2, ge=0)
    """Retries earned back with each request."""
    deaths_max: int = pydantic.Field(default=3, ge=1)
    """Workers lost, or steps failed, in a row as they began to compute one request, until its content is quarantined. A worker counts again only where other answers got on there since. Before the last the request runs isolated from other suspects."""
    quarantine_s: float = pydantic.Field(default=60.0, gt=0)
    """How long a quarantined content is refused."""
    quarantined_max: int = pydantic.Field(default=4096, ge=1)
    """Contents in quarantine at once; past it the oldest leaves."""


class DisaggConfig(Config):
    """When a prompt is computed by a prefill worker for a decode worker."""

    remote_tokens_min: int = pydantic.Field(default=64, ge=1)
    """Prompts with fewer uncached tokens on the decode worker are computed there."""
    local_tokens_max: int | None = pydantic.Field(default=None, ge=0)
    """Prompts with more uncached tokens on the decode worker always go to a prefill worker, if there is one; None: whatever takes fewer seconds."""
    kv_transfer_s: float = pydantic.Field(default=0.005, ge=0)
    """Fixed seconds of a KV transfer, beside moving bytes."""
    link_bytes_per_s: float | None = pydantic.Field(default=None, gt=0)
    """Speed of KV between any two workers; None: `router.topology` by their locations."""


class ExplainConfig(Config):
    """Which decisions are kept for explanations."""

    decisions_max: int = pydantic.Field(default=4096, ge=0)
    """Latest decisions kept by a process; 0 keeps none."""
    bytes_max: int = pydantic.Field(default=16 << 20, ge=1)
    """Memory for them, about: each takes 1.5 KB with 8 workers, 80 KB with 1,000. Past it the oldest are dropped."""
    candidates_max: int = pydantic.Field(default=16, ge=2)
    """Workers that an explanation lists, the cheapest first; the others are counted."""
    logged_share: float = pydantic.Field(default=1.0, ge=0, le=1)
    """Share of decisions that are logged with all inputs, at log level debug."""


class QueueConfig(Config):
    """When requests wait at the router, and in which order. It takes a policy that predicts waits, such as `kv`."""

    threshold_s: float | None = pydantic.Field(default=2.0, gt=0)
    """A request waits here while its predicted wait on every eligible worker is longer than this, and requests wait there; None: never."""
    shared_threshold_s: float = pydantic.Field(default=0.03, gt=0)
    """The same while several tenants have sent requests in the last hour, where it is shorter, since requests that wait inside a worker cannot be overtaken."""
    requests_max: int = pydantic.Field(default=2048, ge=2)
    """Requests queued at once for one model with its LoRA adapters; past it 503. One tenant alone gets half, past it 429."""
    work_weight: float = pydantic.Field(default=10.0, ge=0)
    """A second of predicted work counts as this many seconds of later arrival; 0: first come, first served."""
    overtaken_s_max: float = pydantic.Field(default=60.0, ge=0)
    """A request goes before requests of its tenant that arrived this many seconds later, whatever its work."""
    looked_at_max: int = pydantic.Field(default=8, ge=1)
    """First requests in turn that are priced anew where a worker has room; the one with the earliest turn is sent."""
    tenant_burst_tokens: int = pydantic.Field(default=32_768, ge=0)
    """Prompt tokens by which a tenant that has used less than its share may get ahead of it: a few requests at once then wait for nobody who uses more."""
    priority_factor: float = pydantic.Field(default=4.0, ge=1)
    """Share of a priority over that of the next lower one, while both have requests queued."""


class PrefixSummaryConfig(Config):
    """The summary of prefixes that workers here hold, for links of other regions."""

    bytes_per_s: int = pydantic.Field(default=64_000, ge=0, le=100_000_000)
    """Bytes of prefix hashes that a link may read a second; 0 turns summaries off. The hottest prefixes come first."""
    chunks_max: int = pydantic.Field(default=65_536, ge=1024, le=131_072)
    """Chunks in the summary of one router process, 8 bytes each; a prefix of 25,000 tokens has 22. The coldest leave first."""


class RouterConfig(Config):
    """Routing in one frontend process."""

    policy: str = "kv"
    """`kv` (fewest predicted seconds), `least-loaded`, `power-of-two`, `round-robin`, `random`, `session` (the session's worker, else as `kv`), an entry point of
    the group `penstock.policies`, or `package.module:Class`."""
    sessions_max: int = pydantic.Field(default=SESSIONS_MAX, ge=1)
    """Sessions remembered by the policy `session`; past it the least recently used is forgotten."""
    session_idle_s: float = pydantic.Field(default=SESSION_IDLE_S, gt=0)
    """How long such a session without requests is remembered."""
    busy_kv_share: float | None = pydantic.Field(default=None, gt=0, le=1)
    """A worker with a larger share of its KV blocks in use gets requests only if all are as busy; None: no limit."""
    busy_queued_tokens: int | None = pydantic.Field(default=None, ge=1)
    """A worker with more queued prompt tokens gets requests only if all are as busy; None: no limit."""
    workers_max: int = pydantic.Field(default=1024, ge=1)
    """Workers known at once; further ones are ignored until one leaves."""
    adapters_max: int = pydantic.Field(default=4096, ge=0)
    """LoRA adapters of one model known at once; further ones are not served."""
    indexed_blocks_max: int = pydantic.Field(default=16_777_216, ge=1)
    """Upper bound of (worker, block) pairs in the prefix index, which has room for twice the blocks that workers have, and for at least a million. Past that, old leaves are forgotten."""
    predicted_s: float = pydantic.Field(default=120.0, gt=0)
    """How long a worker without KV events is taken to hold a prompt that was sent to it."""
    open_requests_max: int = pydantic.Field(default=16_384, ge=1)
    """Requests (choices) under way at once; past it 503."""
    no_worker_wait_s: float = pydantic.Field(default=60.0, ge=0)
    """How long a request waits for a worker of its model where none is ready."""
    connect_timeout_s: float = pydantic.Field(default=5.0, gt=0)
    """Timeout of a new connection to a worker."""
    reconnect_s_max: float = pydantic.Field(default=5.0, gt=0)
    """Longest pause between two tries to reach a worker; it begins at a hundredth of this and doubles."""
    location: Location = Location()
    """Where this router runs; the environment of its process overrides it (`PENSTOCK_REGION`, `_ZONE`, `_RACK`, `_HOST`)."""
    topology: Topology = Topology()
    """Latency and bandwidth between locations."""
    queue: QueueConfig = QueueConfig()
    """When requests wait at the router, and in which order."""
    migrations: MigrationConfig = MigrationConfig()
    """How requests of lost workers go on elsewhere."""
    retries: RetryConfig = RetryConfig()
    """What happens to a request that workers refuse, or that may be why workers are lost."""
    disagg: DisaggConfig = DisaggConfig()
    """When prompts are computed by prefill workers."""
    explain: ExplainConfig = ExplainConfig()
    """Which decisions are kept for explanations."""
    prefix_summary: PrefixSummaryConfig = PrefixSummaryConfig()
    """What other regions are told of prefixes."""

    @pydantic.field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        try:
            check_policy_name(policy)
        except ConfigError as error:
            raise wrong(error.message.removeprefix("policy ")) from error
        return policy

    def kv_path(self, one: Location, other: Location) -> NetworkPath:
        """Give latency and bandwidth of KV between two workers."""
        path, link_bytes_per_s = self.topology.path(one, other), self.disagg.link_bytes_per_s
        if link_bytes_per_s is None:
            return path
        return NetworkPath(latency_s=path.latency_s, bandwidth_bytes_per_s=link_bytes_per_s)

    def new_policy(self) -> RoutingPolicy:
        """Make the policy with its settings."""
        return make_policy(self.policy, sessions_max=self.sessions_max, session_idle_s=self.session_idle_s)
