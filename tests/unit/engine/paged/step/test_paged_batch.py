"""The vectorised batch against one built token by token."""

import numpy as np
import pytest

from penstock.core.types.requests import Request, SamplingParams
from penstock.engine.scheduling.sequences import SequenceTable, StepPlan

pytest.importorskip("torch")

from penstock.engine.paged.step.batch import BatchBuilder, RowLimits, bucket
from penstock.engine.paged.step.sampling import SamplingColumns

pytestmark = pytest.mark.engine
BLOCK_SIZE, SPARE = 4, 99
GREEDY = Request(
    request_id="r", model="m", token_ids=b"", sampling=SamplingParams(max_tokens=1, temperature=0.0)
)


def random_state(random: np.random.Generator, num_windows: int = 0) -> tuple[StepPlan, SequenceTable]:
    windows = np.zeros((num_windows, 12, 64 // BLOCK_SIZE), np.int32)
    table = SequenceTable.allocate(12, 64, BLOCK_SIZE, windows)
    slots = random.permutation(12)[: random.integers(1, 12)].astype(np.int32)
    num_decode = int(random.integers(0, len(slots) + 1))
    num_new = np.ones(len(slots), dtype=np.int32)
    samples = np.ones(len(slots), dtype=np.bool_)
    for row, slot in enumerate(slots):
        known = int(random.integers(1, 64))
        table.requests[slot] = GREEDY
        table.token_ids[slot, :known] = random.integers(0, 1000, known)
        table.num_tokens[slot] = known
        blocks = -(-known // BLOCK_SIZE)
        table.block_tables[slot, :blocks] = random.integers(0, SPARE, blocks)
        table.window_tables[:, slot, :blocks] = random.integers(0, SPARE, (len(table.window_tables), blocks))
        table.num_blocks[slot] = blocks
        if row < num_decode:
            table.num_computed[slot] = known - 1
        else:
            table.num_computed[slot] = random.integers(0, known)
            num_new[row] = random.integers(1, known - table.num_computed[slot] + 1)
            samples[row] = table.num_computed[slot] + num_new[row] == known
    return StepPlan(slots, num_new, num_decode, samples), table


@pytest.mark.parametrize("limits", [RowLimits(), RowLimits(3), RowLimits(pairs=100), RowLimits(3, 100)])
@pytest.mark.parametrize("seed", range(20))
def test_equals_a_batch_built_token_by_token(seed, limits):
    plan, table = random_state(np.random.default_rng(seed), num_windows=seed % 3)
    tables = (table.block_tables, *table.window_tables)
    builder = BatchBuilder(BLOCK_SIZE, SPARE, SamplingColumns(()), rows=limits)
    builder.build(
        *random_state(np.random.default_rng(seed + 1), num_windows=seed % 3)
    )  # leaves its tokens in the buffers
    batch, rows = builder.build(plan, table)

    computed = table.num_computed[plan.slots]
    short = [
        row
        for row, (count, before) in enumerate(zip(plan.num_new.tolist(), computed.tolist(), strict=True))
        if count <= limits.tokens or count * (before + count) <= limits.pairs
    ]
    decode = sorted(short, key=lambda row: table.num_computed[plan.slots[row]])
    order = decode + [row for row in range(len(plan.slots)) if row not in short]
    tokens, ends = [], []
    for row in order:
        slot = plan.slots[row]
        for position in range(table.num_computed[slot], table.num_computed[slot] + plan.num_new[row]):
            blocks = [each[slot, position // BLOCK_SIZE] for each in tables]
            tokens.append((table.token_ids[slot, position], position, position % BLOCK_SIZE, *blocks))
        ends.append(len(tokens))

    assert batch.num_tokens == len(tokens)
    assert batch.tokens.shape == (3 + len(tables), bucket(len(tokens)))
    np.testing.assert_array_equal(batch.tokens[:, : len(tokens)].T, tokens)
    assert all(
        column.tolist() == [0, 0, 0] + [SPARE] * len(tables) for column in batch.tokens[:, len(tokens) :].T
    )
    assert rows.tolist() == [row for row in order if plan.samples[row]]
    assert batch.last_tokens.tolist() == [
        end - 1 for row, end in zip(order, ends, strict=True) if plan.samples[row]
    ]
    assert batch.sampling is None

    of_token = [row for row in decode for _ in range(plan.num_new[row])]
    assert batch.num_decode == len(of_token)
    assert batch.decode_lengths.tolist() == [token[1] + 1 for token in tokens[: len(of_token)]]
    for index, row in enumerate(of_token):
        used = -(-batch.decode_lengths[index] // BLOCK_SIZE)
        for table_ids, block_ids in zip(batch.decode_tables, tables, strict=True):
            np.testing.assert_array_equal(table_ids[index, :used], block_ids[plan.slots[row], :used])
    spans = slice(len(decode), None)
    for span, row, end in zip(batch.prefills, order[spans], ends[spans], strict=True):
        slot = plan.slots[row]
        assert (span.start, span.end, span.num_cached) == (
            end - plan.num_new[row],
            end,
            table.num_computed[slot],
        )
        used = -(-(table.num_computed[slot] + plan.num_new[row]) // BLOCK_SIZE)
        for span_ids, block_ids in zip(span.block_ids, tables, strict=True):
            np.testing.assert_array_equal(span_ids, block_ids[slot, :used])


def test_buckets_are_few_and_close():
    sizes = [bucket(count) for count in range(1, 4097)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert all(size < count * 1.125 for count, size in enumerate(sizes, 1) if count > 32)
    assert sorted(set(sizes))[:10] == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]
    assert len(set(sizes)) < 70
