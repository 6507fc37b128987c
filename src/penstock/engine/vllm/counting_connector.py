"""Where Penstock's KV tiers would attach to vLLM: a connector that counts what they would be asked, and moves nothing.

vLLM imports this in its own processes, by `kv_connector_module_path`. It runs alone or beside others in a MultiConnector.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class CountingStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name since the last report; scheduler and device processes add up."""

    data: dict[str, int]

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: "CountingStats") -> "CountingStats":
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class CountingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Matches nothing and stores nothing.

    It counts in the scheduler `asked_requests` and their `asked_tokens` that vLLM's own cache lacks, the `full_blocks`
    that steps complete, which a tier could store, and `loaded_tokens`, which stay 0; in device processes the layers of
    steps that could be saved (`saved_layers`).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Make a connector for the scheduler, or for a device process."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._stats = CountingStats()
        self._asked: set[str] = set()
        """Requests that are counted: vLLM asks once more for those that it could not admit."""

    # -- the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id not in self._asked:
            self._asked.add(request.request_id)
            self._stats.add(asked_requests=1, asked_tokens=request.num_prompt_tokens - num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002
        self._stats.add(loaded_tokens=num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            before = computed.get(request_id, 0)
            self._stats.add(full_blocks=(before + tokens) // self._block_size - before // self._block_size)
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002
        self._asked.discard(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    # -- a device process

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._stats.add(saved_layers=1)

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    # -- both

    def get_kv_connector_stats(self) -> CountingStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, CountingStats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CountingStats:
        return CountingStats(data=data or {})
