"""Penstock's KV tiers as a connector of vLLM, alone or beside others in a MultiConnector.

vLLM imports this in its own processes, by `kv_connector_module_path`. The scheduler's process matches prompts and pins blocks;
device processes own the tiers and copy. Both talk with the messages of vLLM's steps.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from penstock.core.log import get_logger
from penstock.engine.kv_tiers.memory import HostMemory, TorchMemory
from penstock.engine.kv_tiers.staged import staged_tiers
from penstock.engine.vllm.arguments import tokens_per_block
from penstock.engine.vllm.tiers.groups import kv_groups
from penstock.engine.vllm.tiers.prompts import PromptHashes, StepTokens
from penstock.engine.vllm.tiers.settings import TierSettings
from penstock.engine.vllm.tiers.stats import pack_stats
from penstock.engine.vllm.tiers.storage import device_process
from penstock.kv.connector.orders import Orders, Report
from penstock.kv.connector.scheduler import KvConnectorScheduler
from penstock.kv.connector.worker import KvConnectorWorker
from penstock.kv.groups import KvGroup, KvGroups

_AWAITED_S = 30.0
"""A late load ends in far less; after that its blocks may still be written, and the step must not begin."""


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """What goes with a step to all device processes."""

    orders: Orders


@dataclass
class RankReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What comes back with a step, by device process."""

    by_rank: dict[int, Report]

    def aggregate(self, other: "RankReports") -> "RankReports":
        return RankReports(self.by_rank | other.by_rank)


@dataclass
class TierReport(KVConnectorStats):  # type: ignore[misc]
    """What `TierStats` reads in the worker."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: "TierReport") -> "TierReport":
        events = [*self.data.get("events", ()), *other.data.get("events", ())]
        self.data = {**self.data, **other.data, "events": events}
        return self

    def reduce(self) -> dict[str, int]:
        return {}

    def is_empty(self) -> bool:
        return not self.data


class PenstockConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One class for both sides, as vLLM has it: `role` says which one an object is.

    Groups of layers may have tables of blocks of their own (vLLM's hybrid memory allocator). vLLM then knows loads that failed
    by their request alone, and only such that no step waits for.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Make a side.

        Raises:
            ConfigError: tiers cannot keep the blocks of a group of the model's layers.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_groups(vllm_config, kv_cache_config)
        settings = TierSettings.read(self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerSide(settings, vllm_config, kv_cache_config, groups)
        else:
            self._worker = _WorkerSide(settings, vllm_config, kv_cache_config, groups)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request must be computed again if a save was lost: no, tiers are a cache."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:  # noqa: ARG003 - vLLM's signature
        return "LBHNC"

    # -- the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._scheduler.reserve(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._scheduler.begin_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.end_step(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, None]:
        self._scheduler.finish(request)
        return False, None  # the blocks are pinned while they are read

    def has_pending_push_work(self) -> bool:
        return self._scheduler.side.needs_steps

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.side.has_pinned

    def reset_cache(self) -> bool:
        self._scheduler.side.clear()
        return True

    # -- a device process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.open(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: a request is scheduled once its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing: whole blocks are saved when their request has ended."""

    def wait_for_save(self) -> None:
        """Begin saves, after the step's forward pass: it may write their blocks. They are pinned until a report releases them."""
        self._worker.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        ended, failed = self._worker.ended_requests()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_missing()

    def build_connector_worker_meta(self) -> RankReports:
        return self._worker.take_report()

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()

    # -- both

    def get_kv_connector_stats(self) -> TierReport | None:
        return self._scheduler.take_stats() if self.role == KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierReport:
        return TierReport(data=data or {})


class _SchedulerSide:
    """vLLM's requests, blocks and steps in the terms of `KvConnectorScheduler`."""

    def __init__(
        self, settings: TierSettings, vllm_config: Any, kv_cache_config: Any, groups: Sequence[KvGroup]
    ) -> None:
        self._block_size = tokens_per_block(vllm_config)
        self._num_groups = len(groups)
        tables = KvGroups(groups, self._block_size)
        for group in groups if len(groups) > 1 else ():
            get_logger().info(
                "kv_group",
                kind=group.kind,
                layers=len(group.layers),
                bytes_per_token=group.bytes_per_token,
                window_tokens=group.window_tokens,
            )
        self._may_wait = tables.is_one_table
        self._retention: int | None = kv_cache_config.prefix_cache_retention_interval
        self._hashes = PromptHashes(self._block_size, settings.hash_key)
        self.pool: Any = None
        self.side = KvConnectorScheduler(
            self,
            block_size=self._block_size,
            num_blocks=kv_cache_config.num_blocks,
            num_ranks=vllm_config.parallel_config.world_size,
            groups=tables,
        )
        self._quick: set[str] = set()
        """Requests whose step waits for their load, as vLLM was told."""
        self._steps: deque[tuple[float, StepTokens]] = deque()
        """Begin of steps under way, and the tokens that they compute."""
        self._step_ended_s = 0.0
        self._told: object = None
        """Counts and holders."""

    # -- DeviceCache

    def pin(self, keys: Sequence[Any]) -> list[int]:
        blocks = []
        for block_hash, group in keys:
            found = self.pool.get_cached_block(block_hash, [group])
            if not found:
                break
            blocks += found
        self.pool.touch(blocks)
        return [block.block_id for block in blocks]

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in reversed(block_ids)])

    # -- requests

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        hashes = self._hashes.of(request)
        if hashes is None:
            return 0, False
        usable = hashes[: (request.num_tokens - 1) // self._block_size]  # one token at least is computed
        count = self.side.match(
            request.request_id, usable, num_computed_tokens // self._block_size, request.num_tokens
        )
        self._quick.discard(request.request_id)
        junction = self.side.junction(request.request_id) * self._block_size
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, junction)
        if not count:
            return (None if count is None else 0), False
        is_quick = self._may_wait and self.side.is_quick(request.request_id)
        if is_quick:
            self._quick.add(request.request_id)
        return count * self._block_size, not is_quick

    def reserve(self, request: Any, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        request_id = request.request_id
        is_awaited = request_id in self._quick
        self.side.reserve(request_id, block_ids, num_tokens // self._block_size, is_awaited=is_awaited)

    def finish(self, request: Any) -> None:
        """Have the blocks offloaded that are complete: the last token is not computed, nor what is still in flight."""
        request_id = request.request_id
        if not self.side.is_loading(request_id) and (hashes := self._hashes.of(request)) is not None:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            count = min(
                computed // self._block_size,
                (request.num_tokens - 1) // self._block_size,
                len(hashes),
                len(request.block_hashes),
            )
            if count > 0:
                names = request.block_hashes[:count]
                keys = [[(name, group) for name in names] for group in range(self._num_groups)]
                self.side.commit(hashes[:count], keys, self._ends(request, count))
        self.side.forget(request_id)
        self._quick.discard(request_id)
        self._hashes.forget(request_id)

    def _ends(self, request: Any, count: int) -> set[int]:
        """Give the prefixes of which vLLM keeps the windows: of the prompt, of what it shares, and by intervals."""
        tokens = {request.num_prompt_tokens - 1, request.shared_prefix_boundary}
        if self._retention is None:
            tokens.add(count * self._block_size)
        elif self._retention:
            tokens |= set(range(self._retention, count * self._block_size + 1, self._retention))
        return {each // self._block_size for each in tokens}

    # -- steps

    def begin_step(self, output: Any) -> StepOrders:
        self._steps.append((perf_counter(), StepTokens.of(output)))
        return StepOrders(self.side.take_orders())

    def end_step(self, reports: RankReports | None) -> None:
        now_s = perf_counter()
        if self._steps:
            begun_s, tokens = self._steps.popleft()
            self.side.prefill.measure(
                tokens.prompt,
                now_s - max(begun_s, self._step_ended_s),
                decode_rows=tokens.decode,
                context_tokens=tokens.context,
            )
        self._step_ended_s = now_s
        if reports is not None:
            self.side.take_reports(reports.by_rank)

    def take_stats(self) -> TierReport | None:
        events, counts = self.side.take_events(), self.side.counts()
        told = counts, self.side.holders
        if not events and told == self._told:
            return None
        self._told = told
        return TierReport(data=pack_stats(counts, events, self.side.holders))


class _WorkerSide:
    """A device process's tiers."""

    def __init__(
        self, settings: TierSettings, vllm_config: Any, kv_cache_config: Any, groups: Sequence[KvGroup]
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._fails_whole = not KvGroups(groups, tokens_per_block(vllm_config)).is_one_table
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._rank: int = vllm_config.parallel_config.rank
        self._memory: Any = None
        self._side: KvConnectorWorker | None = None
        self._report: Report | None = None
        self._missing: set[int] = set()

    def open(self, kv_caches: dict[str, Any]) -> None:
        device = next(iter(kv_caches.values())).device
        memory_type = HostMemory if device.type == "cpu" else TorchMemory
        memory = memory_type(kv_caches, self._kv_cache_config.num_blocks)
        self._memory = memory
        process = device_process(
            self._settings, memory.block_bytes, self._vllm_config, self._kv_cache_config, self._groups
        )
        self._side = KvConnectorWorker(
            lambda staging: staged_tiers(self._settings.kv, process, staging), memory
        )

    def load(self, step: StepOrders) -> None:
        if self._side is not None:
            self._memory.mark()
            self._side.submit(replace(step.orders, saves=()))
            if any(load.is_awaited for load in step.orders.loads) and not self._side.wait_for_awaited(
                _AWAITED_S
            ):
                raise TimeoutError(f"a load from host memory did not end within {_AWAITED_S:g} s")

    def save(self, step: StepOrders) -> None:
        if self._side is not None:
            self._memory.mark()
            self._side.submit(Orders(saves=step.orders.saves))

    def ended_requests(self) -> tuple[set[str], set[str]]:
        """Take a report, and give the requests whose loads it ends, and of them those that have to compute all again.

        Called once in a step, before what tells the rest of it. With one table of blocks `take_missing` names what did not arrive.
        """
        self._report = self._side.take_report() if self._side is not None else None
        if self._report is None:
            return set(), set()
        loads = [loaded for loaded in self._report.loaded if not loaded.is_awaited]
        ended = {loaded.request_id for loaded in loads}
        if self._fails_whole:
            return ended, {loaded.request_id for loaded in loads if loaded.missing}
        self._missing = {block for loaded in self._report.loaded for block in loaded.missing}
        return ended, set()

    def take_missing(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing

    def take_report(self) -> RankReports:
        """Give the report, also an empty one: vLLM tells the scheduler of no step that has computed and reported nothing."""
        report, self._report = self._report, None
        return RankReports({} if report is None else {self._rank: report})

    def close(self) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.close()
