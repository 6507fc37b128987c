"""A worker's load report, and what frontends count of their tenants through a worker."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import EventBatch, KvEvent, Tier
from penstock.core.types.requests import Delta
from penstock.core.wire import Wire


class KvRead(Wire, frozen=True):
    """Totals of a decode worker's KV reads from one prefill worker since its start; `transport` is that of the latest read."""

    prefill_worker: WorkerId
    transport: str
    num_bytes: int
    seconds: float


class KvTierCounts(Wire, frozen=True):
    """What a KV tier below a worker's device keeps, and what it has done since start.

    Attributes:
        total_blocks: how many blocks of `block_bytes` it can keep.
        cached_blocks: how many it keeps.
        is_off: it is not used for a while, since it failed or hung.
        hit_tokens: prompt tokens that admitted requests found in it.
        loads: runs of blocks requested from it.
        loaded_blocks: blocks that arrived and were used.
        load_s: sum of the seconds of all loads; overlapping loads count in full.
        saved_s: predicted seconds of computing the loaded blocks, less what requests waited for them; below 0 if it cost time.
        offloaded_blocks: copied to it, or being copied now.
        dropped_blocks: not copied, since they were evicted from the device first or the tier had no room.
        late_loads: loads that took too long and were given up.
        missing_blocks: requested blocks that did not arrive and were computed.
        corrupt_blocks: dropped, since their bytes did not match their checksum.
        prefetched_blocks: whose load began while their request waited for the batch.
        wasted_blocks: prefetched, and then not needed: the request was aborted or others needed the room.
    """

    tier: Tier
    total_blocks: int = 0
    cached_blocks: int = 0
    block_bytes: int = 0
    is_off: bool = False
    hit_tokens: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    offloaded_blocks: int = 0
    dropped_blocks: int = 0
    late_loads: int = 0
    missing_blocks: int = 0
    corrupt_blocks: int = 0
    prefetched_blocks: int = 0
    wasted_blocks: int = 0

    @classmethod
    def of_ranks(cls, ranks: "Sequence[KvTierCounts]") -> "KvTierCounts":
        """Sum the counts of one tier of several data-parallel ranks."""
        total = {name: sum(getattr(each, name) for each in ranks) for name in _TIER_SUMMED}
        return msgspec.structs.replace(ranks[0], is_off=any(each.is_off for each in ranks), **total)


_TIER_SUMMED = tuple(
    name for name in KvTierCounts.__struct_fields__ if name not in {"tier", "block_bytes", "is_off"}
)


class ModelLoad(Wire, frozen=True):
    """The load of a model's ready workers together, as a frontend knows it; other deployments that it may use do not count.

    Attributes:
        workers: that may get requests now.
        queued_prefill_tokens: as in `WorkerLoad`, like the others; prefill workers' included.
    """

    workers: int
    block_size: int
    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    context_tokens: int = 0
    active_blocks: int = 0
    total_blocks: int = 0


LINK_VERSION = 1
"""Of what a region's link and the other region's frontends say to each other; neighbouring versions work together."""


class DeploymentLoads(Wire, frozen=True):
    """What a frontend says of its deployment to other regions: the answer to `GET /load`.

    Attributes:
        models: by the names that clients ask for.
        region: where it is; empty where nobody says.
        link_version: its `LINK_VERSION`; 0: of an older release.
        time_s: Unix time there.
    """

    models: dict[str, ModelLoad]
    region: str = ""
    link_version: int = 0
    time_s: float = 0.0


class LinkProblem(StrEnum):
    """Why a link's region gets no requests, or why its prefix summaries do not count."""

    UNREACHABLE = "unreachable"  # no connection, no answer, or no worker there
    CERTIFICATE = "certificate"  # not trusted here
    KEY = "key"  # the region expects another API key
    OTHER_SERVER = "other_server"  # another region or model, or an incompatible release
    SECRET = "secret"  # noqa: S105 - its block hashes differ, so its prefix summaries do not count


class LinkReport(Wire, frozen=True):
    """A link's report about its region.

    Attributes:
        region: its name.
        frontends: that the link knows; `healthy` of them answer.
        moved: requests that went on at another frontend after one failed, since the start.
        refused: requests that the region had no room for, since the start.
        clock_skew_s: seconds by which the region's clock is ahead.
        round_trip_s: measured round trip; 0 before the first answer.
        advertised_chunks: chunks in the region's prefix summaries.
        advertised_at_s: time of its last summary by the link's clock, seconds since 1970; 0: never.
        problem: a `LinkProblem`; empty where all is well.
    """

    region: str
    frontends: int
    healthy: int
    moved: int = 0
    refused: int = 0
    clock_skew_s: float = 0.0
    round_trip_s: float = 0.0
    advertised_chunks: int = 0
    advertised_at_s: float = 0.0
    problem: str = ""


class RefusedFrontends(Wire, frozen=True):
    """How many connections of frontends a worker has not accepted since its start, for one reason."""

    reason: str
    count: int


class WorkerLoad(Wire, frozen=True):
    """A worker's report to one frontend; the router adds what it has reserved since.

    Attributes:
        active_blocks: blocks held by live requests, or kept by operators' pins; other cached blocks without a request do not count.
        cached_blocks: blocks in the prefix cache, in use or not.
        queued_prefill_tokens: prompt tokens not computed yet, of waiting and running requests.
        context_tokens: tokens of context of all running requests.
        steps: since start, like `preemptions`, `prefilled_tokens`, `prefix_hit_tokens`, `generated_tokens`.
        accepted_requests: how many requests of this frontend these figures include; its router drops its own
            reservations for them.
        peers: other connected frontends.
        peer_requests: unfinished requests of these.
        peer_prefill_tokens: prompt tokens that requests of these without a first token had to compute, as their routers expected.
        peer_prefill_pairs: pairs of such a token with a token that it attends to.
        peer_arrivals: requests accepted from these since start.
        onboarded_tokens: prompt tokens that admitted requests found in each `Tier` below the device, host first;
            empty without such tiers.
        oldest_wait_s: longest time that a request has waited for its first token so far.
        kv_reads: the prefill workers read from most recently.
        kv_failures: prompts that a decode worker recomputed since their KV did not arrive.
        kv_expired: prompts whose pinned KV no decode worker read in time.
        kv_refused: prompts that a prefill worker exported no KV of, since too many blocks were pinned.
        failed_steps: how many of `steps` failed.
        kv_tiers: the tiers below the device, nearest first.
        pinned_blocks: device blocks that operators' pins keep.
        kv_corrupt: how many of `kv_failures` and early transfers brought bytes other than those at the prefill worker.
        ranks: the loads of data-parallel ranks, of which the other fields are the sum; empty with one rank. A frontend gets
            the load of one rank.
        number: counts a worker's reports, so that one that comes late by a broker is not taken for the newest; 0 where they
            come in order.
        refused_frontends: connections that were not accepted since start, by reason.
        link: of a link to another region; None of other workers.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    queued_prefill_tokens: int = 0
    context_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    accepted_requests: int = 0
    peers: int = 0
    peer_requests: int = 0
    peer_prefill_tokens: int = 0
    peer_prefill_pairs: int = 0
    peer_arrivals: int = 0
    onboarded_tokens: tuple[int, ...] = ()
    oldest_wait_s: float = 0.0
    kv_reads: tuple[KvRead, ...] = ()
    kv_failures: int = 0
    kv_expired: int = 0
    kv_refused: int = 0
    failed_steps: int = 0
    kv_tiers: tuple[KvTierCounts, ...] = ()
    pinned_blocks: int = 0
    kv_corrupt: int = 0
    ranks: "tuple[WorkerLoad, ...]" = ()
    number: int = 0
    refused_frontends: tuple[RefusedFrontends, ...] = ()
    link: LinkReport | None = None

    @classmethod
    def of_ranks(cls, ranks: "Sequence[WorkerLoad]") -> "WorkerLoad":
        """Sum the loads of an engine's data-parallel ranks; of a single one, give its own."""
        if len(ranks) == 1:
            return ranks[0]
        sums = {name: sum(getattr(each, name) for each in ranks) for name in _SUMMED}
        tiers = [each.kv_tiers for each in ranks if each.kv_tiers]  # () before a rank's tiers are made
        hits = [each.onboarded_tokens for each in ranks if each.onboarded_tokens]
        return cls(
            **sums,
            oldest_wait_s=max(each.oldest_wait_s for each in ranks),
            onboarded_tokens=tuple(map(sum, zip(*hits, strict=True))),
            kv_tiers=tuple(KvTierCounts.of_ranks(same) for same in zip(*tiers, strict=True)),
            ranks=tuple(ranks),
        )


_SUMMED = tuple(field.name for field in msgspec.structs.fields(WorkerLoad) if field.type is int)

TENANTS_MAX = 8192
"""Tenants in one message, twice as many as a key file has."""
NAME_CHARACTERS_MAX = 256

_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class TenantCount(Wire, frozen=True):
    """What one tenant's requests at a frontend have used since the frontend counted last, and how many are in flight.

    Attributes:
        tokens: below 0 where answers were shorter than expected.
    """

    requests: _Count = 0
    tokens: Annotated[int, msgspec.Meta(ge=-(1 << 40), le=1 << 40)] = 0
    inflight: _Count = 0


TenantCounts = Annotated[tuple[tuple[_Name, TenantCount], ...], msgspec.Meta(max_length=TENANTS_MAX)]
"""By the tenant's name."""


class PeerCount(Wire, frozen=True):
    """What one tenant's requests at other frontends have used since this frontend counted last, and how many are in flight.

    Attributes:
        frontends: other frontends that had requests of the tenant lately.
    """

    requests: int = 0
    tokens: int = 0
    inflight: int = 0
    frontends: int = 0


class Step(Wire, frozen=True):
    """Everything one engine step changed.

    `prefilling` lists requests with a prefill chunk in this step whose prompt is not finished. `events` are all of one
    data-parallel rank, `rank`.
    """

    deltas: tuple[Delta, ...] = ()
    events: tuple[KvEvent, ...] = ()
    load: WorkerLoad | None = None
    prefilling: tuple[RequestId, ...] = ()
    rank: int = 0


class FrontendFigures(Wire, frozen=True):
    """The part of a load report that differs from frontend to frontend; see `WorkerLoad`.

    Attributes:
        key: that the frontend gave its connection.
    """

    key: bytes
    accepted_requests: int = 0
    peers: int = 0
    peer_requests: int = 0
    peer_prefill_tokens: int = 0
    peer_prefill_pairs: int = 0
    peer_arrivals: int = 0

    @classmethod
    def of(cls, key: bytes, load: WorkerLoad) -> "FrontendFigures":
        """Take a frontend's part of a report to it."""
        return cls(key=key, **{name: getattr(load, name) for name in _FIGURES})

    def complete(self, load: WorkerLoad) -> WorkerLoad:
        """Make the report to this frontend of a report to another one."""
        return msgspec.structs.replace(load, **{name: getattr(self, name) for name in _FIGURES})


_FIGURES = FrontendFigures.__struct_fields__[1:]


class RankNews(Wire, frozen=True):
    """What is new of one data-parallel rank.

    Attributes:
        batches: KV events, of each holder in order.
        load: the newest load report, if there is a new one; that of the first of `frontends`.
        frontends: whom it is for, and what differs for each.
    """

    rank: int = 0
    batches: tuple[EventBatch, ...] = ()
    load: WorkerLoad | None = None
    frontends: tuple[FrontendFigures, ...] = ()


class Broadcast(Wire, frozen=True):
    """One message of a worker, named by the id under which it is registered."""

    worker_id: WorkerId
    ranks: tuple[RankNews, ...]
