"""The paged engine's runner: build the batch, run the model over paged KV, sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.hashing import DEFAULT_KEY
from penstock.core.log import get_logger
from penstock.core.types.instances import OPTIONAL_SAMPLING
from penstock.core.types.requests import PromptLogprobs, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.engine.batched import BatchedEngine
from penstock.engine.kv_tiers import TierMaker
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.paged.memory import (
    Fence,
    Gather,
    KvMemory,
    PagedConfig,
    keep_to_cores,
    make_fence,
    plan_blocks,
)
from penstock.engine.paged.models import LayerGroups, PagedModel, load_model, read_config
from penstock.engine.paged.sampling import Sampler, SamplingColumns, TokenMasks
from penstock.engine.paged.step import BatchBuilder, PagedStep, PromptRows, StepBatch, row_limits
from penstock.engine.paged.structured import Grammars, Matchers
from penstock.engine.runner import RunnerInfo, ThreadedRunner, end_tokens_within
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan

_log = get_logger()
_LOGITS_BYTES = 64 << 20
"""Memory for the logits of the prompt rows that are computed together: logits of a whole prompt would not fit the device."""


class DeviceTokens:
    """Copies a batch's tokens to the device, into a buffer with a fixed address, as CUDA graphs need it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, 0, dtype=torch.int64, device=device)

    def put(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Return (rows, bucket) tokens on the device; on a CPU that is the builder's buffer itself."""
        host = torch.from_numpy(tokens)
        if self._device.type == "cpu":
            return host
        size = host.shape[1]
        if size > self._buffer.shape[1]:
            self._buffer = torch.empty(len(host), size, dtype=torch.int64, device=self._device)
        return self._buffer[:, :size].copy_(host)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The parts that exist between `start` and `close`."""

    model: PagedModel
    memory: KvMemory
    gather: Gather
    columns: SamplingColumns
    builder: BatchBuilder
    tokens: DeviceTokens
    sampler: Sampler
    fence: Fence


class PagedRunner:
    """The `BlockingRunner` of the paged engine.

    `run` converts the plan to a `StepBatch`, calls `execute`, and converts its result. `execute` takes plain arrays, so that
    all ranks of a tensor-parallel group could run the same batch.
    """

    def __init__(
        self,
        config: PagedConfig,
        grammars: Grammars | None = None,
        *,
        make_fence: Callable[[torch.device], Fence] = make_fence,
    ) -> None:
        """Make a runner; `start` loads the model.

        Args:
            config: model, device and KV memory.
            grammars: of constrained requests; None: its own.
            make_fence: makes the fence of the device.
        """
        self._config = config
        self._grammars = grammars or Grammars()
        self._make_fence = make_fence
        self._parts: _Loaded | None = None

    def start(self) -> RunnerInfo:
        """Load the model and allocate KV memory.

        Raises:
            ConfigError: the model or a setting cannot work.
        """
        config = self._config
        keep_to_cores(config.device, config.threads)
        device = torch.device(config.device if config.device.startswith("cuda") else "cpu")
        torch.set_num_threads(config.threads)
        checkpoint = Checkpoint.open(config.model)
        model_config = read_config(checkpoint)
        context_length = checkpoint.served_context(config.context_length)
        model = load_model(checkpoint, model_config, config.dtype, device, context_length=context_length)
        if checkpoint.has_long_factors(context_length):
            _log.info(
                "long_rotary_factors",
                context_tokens=context_length,
                hint="short requests lose some quality; a smaller context_length takes the short ones",
            )
        groups = LayerGroups.of(model.layer_windows, context_length, divide=config.window_tables)
        kv_shape = replace(model.kv_shape, num_layers=groups.layers_per_block)
        block_bytes = kv_shape.block_bytes(config.block_size)
        num_blocks = plan_blocks(
            block_bytes,
            kv_blocks=config.kv_blocks,
            kv_memory_bytes=config.kv_memory_bytes,
            device=model.device,
            sharing_engines=config.sharing_engines,
        )
        memory = KvMemory(kv_shape, num_blocks, config.block_size, model.device, groups.places)
        ends = dict.fromkeys((*checkpoint.eos_token_ids, *config.eos_token_ids))
        eos_token_ids = end_tokens_within(model.vocab_size, tuple(ends))
        structured = self._grammars.open(checkpoint.path, model.vocab_size, eos_token_ids)
        columns = SamplingColumns(
            eos_token_ids,
            TokenMasks(
                model.vocab_size,
                Matchers(self._grammars, model.vocab_size, eos_token_ids) if structured else None,
            ),
        )
        self._parts = _Loaded(
            model=model,
            memory=memory,
            gather=Gather(memory),
            columns=columns,
            builder=BatchBuilder(
                config.block_size, memory.spare_block, columns, rows=row_limits(memory, model.num_heads)
            ),
            tokens=DeviceTokens(model.device),
            sampler=Sampler(model.vocab_size, model.device),
            fence=self._make_fence(model.device),
        )
        return RunnerInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            context_length=context_length,
            vocab_size=model.vocab_size,
            eos_token_ids=eos_token_ids,
            kv_bytes_per_block=block_bytes,
            kv_layout=memory.layout,
            embedding_size=model.embedding_size,
            structured_outputs=structured,
            windows=groups.held_windows(),
            groups=groups.kv_groups(config.block_size),
            sampling_fields=tuple(
                name for name in OPTIONAL_SAMPLING if name != "prompt_logprobs" or model.has_scores
            ),
        )

    def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        """Compute one step; on return or error the device has finished all its work."""
        batch, rows = self._loaded.builder.build(plan, table)
        embedded = _embedded(plan, table, rows)
        try:
            token_ids, logprobs = self.execute(batch)
            states = self._hidden(embedded)
            reported = self._prompt_logprobs(batch)
        finally:
            self._loaded.fence.wait()
        sampled = np.full(len(plan.slots), -1, dtype=np.int32)
        sampled[rows] = token_ids
        return Sampled(
            sampled,
            logprobs={int(rows[row]): logprob for row, logprob in logprobs.items()},
            errors={int(rows[row]): error for row, error in self._loaded.columns.errors.items()},
            embeddings={int(rows[row]): state for row, state in zip(embedded, states, strict=True)},
            prompt_logprobs=reported,
        )

    def execute(self, batch: StepBatch) -> tuple[NDArray[np.int64], dict[int, TokenLogprob]]:
        """Compute a batch; return token ids and logprobs by sampled row."""
        parts = self._loaded
        with torch.inference_mode():
            tokens = parts.tokens.put(batch.tokens)
            step = PagedStep(batch, tokens[2:], parts.gather)
            last_tokens = torch.from_numpy(batch.last_tokens).to(parts.model.device)
            rows = None
            if batch.prompt is not None:
                rows = len(last_tokens)
                last_tokens = torch.cat(
                    (last_tokens, torch.from_numpy(batch.prompt.tokens).to(parts.model.device))
                )
            logits = parts.model.logits(tokens[0], tokens[1], last_tokens, step, rows)
            return parts.sampler.sample(logits, batch.sampling)

    def _hidden(self, embedded: Sequence[int]) -> list[bytes]:
        """Give the hidden states of sampled rows of the latest `execute`, as in `Delta.embedding`."""
        if not embedded:
            return []
        states = self._loaded.model.last_hidden[list(embedded)].float().cpu().numpy()
        return [state.astype("<f4").tobytes() for state in states]

    def _prompt_logprobs(self, batch: StepBatch) -> dict[int, PromptLogprobs]:
        """Report the prompt tokens of the latest `execute`, by row of the plan."""
        if batch.prompt is None:
            return {}
        with torch.inference_mode():
            return prompt_logprobs(self._loaded.model, len(batch.last_tokens), batch.prompt)

    def kv_memory(self) -> Sequence[Sequence[object]]:
        memory: KvMemory = self._loaded.memory
        return ((memory.storage,),)

    def close(self) -> None:
        """Release the model and the memory."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.memory.close()

    @property
    def _loaded(self) -> _Loaded:
        assert self._parts is not None, "used before start, or after close"
        return self._parts


def _embedded(plan: StepPlan, table: SequenceTable, rows: NDArray[np.int64]) -> list[int]:
    """List those of the sampled rows whose requests want an embedding.

    They end with their prompt. The row is a decode row if the last token of the prompt is a chunk of its own.
    """
    slots = plan.slots[rows]
    prompts = np.flatnonzero(table.num_tokens[slots] == table.num_prompt[slots]).tolist()
    requests = ((row, table.requests[slots[row]]) for row in prompts)
    return [row for row, request in requests if request is not None and request.embeds]


def paged_engine(
    config: PagedConfig,
    scheduling: SchedulerConfig | None = None,
    *,
    hash_key: bytes = DEFAULT_KEY,
    make_tiers: TierMaker | None = None,
) -> BatchedEngine:
    """Make an engine; `start` loads its model, and then makes the KV tiers below its device."""
    grammars = Grammars()
    return BatchedEngine(
        ThreadedRunner(PagedRunner(config, grammars)),
        scheduling,
        hash_key=hash_key,
        make_tiers=make_tiers,
        preparer=grammars,
    )


def prompt_logprobs(model: PagedModel, before: int, prompt: PromptRows) -> dict[int, PromptLogprobs]:
    """Report a step's prompt tokens, by row of the plan; see `PromptLogprobs`.

    Args:
        model: has just computed the step.
        before: rows of its hidden states before those of the prompt tokens.
        prompt: the prompt tokens.
    """
    targets = torch.from_numpy(prompt.targets).to(model.device)
    count, together = len(targets), max(_LOGITS_BYTES // (4 * model.vocab_size), 1)
    most = min(max(span.alternatives for span in prompt.spans), model.vocab_size)
    parts = [
        _logprobs(
            model.scores(before + start, before + min(start + together, count)).float(),
            targets[start : start + together],
            most,
        )
        for start in range(0, count, together)
    ]
    token_ids, logprobs, ranks = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    reported, row = {}, 0
    for span in prompt.spans:
        end, width = row + span.end - span.start, 1 + span.alternatives
        reported[span.row] = PromptLogprobs(
            start=span.start,
            token_ids=pack_tokens(token_ids[row:end, :width]),
            logprobs=logprobs[row:end, :width].astype("<f4").tobytes(),
            ranks=pack_tokens(ranks[row:end]),
        )
        row = end
    return reported


def _logprobs(
    logits: torch.Tensor, targets: torch.Tensor, alternatives: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give (rows, 1 + alternatives) token ids and logprobs, each row's target first, and the targets' (rows,) ranks."""
    chosen = logits.gather(1, targets[:, None])
    top, top_ids = logits.topk(alternatives)
    ranks = (logits > chosen).sum(1) + 1
    logprobs = torch.cat((chosen, top), 1) - logits.logsumexp(1, keepdim=True)
    return torch.cat((targets[:, None], top_ids), 1).int(), logprobs, ranks.int()
