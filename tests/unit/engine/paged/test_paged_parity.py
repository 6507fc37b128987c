"""Greedy outputs equal to those of transformers' own `generate`, token for token, however they are computed."""

from collections import Counter

import pytest

from penstock.core.types.events import BlockRemoved

torch = pytest.importorskip("torch")

from penstock.engine.paged import step as decoding_module  # noqa: E402
from penstock.engine.paged import step as step_module  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]
COUNTS = {"llama": 32, "mistral": 32, "qwen2": 32, "qwen3": 32, "gemma3": 32, "qwen3_moe": 8, "gemma2": 8}
"""How many prompts an architecture is tried with."""

every_architecture = pytest.mark.parametrize(
    ("architecture", "count"),
    [
        pytest.param(name, count, marks=() if name in {"llama", "gemma3"} else pytest.mark.nightly, id=name)
        for name, count in COUNTS.items()
    ],
)


@every_architecture
@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.nightly), 8])
def test_at_every_concurrency(engine, reference, architecture, count, concurrency):
    expected, paged = reference(architecture), engine(architecture)
    count = min(count, 4 * concurrency)
    expected.check(paged.run(*expected.requests(count), concurrency=concurrency), count)


@every_architecture
def test_in_chunks_beside_running_requests(engine, reference, architecture, count):
    expected, paged = reference(architecture), engine(architecture, max_batch_tokens=29)
    expected.check(paged.run(*expected.requests(count), concurrency=8), count)
    assert paged.chunks > 5
    assert paged.mixed_steps > 5


@every_architecture
def test_with_prefix_hits(engine, reference, architecture, count):
    expected, paged = reference(architecture), engine(architecture, max_batch_tokens=200)
    count = min(count, 12)
    expected.check(paged.run(*expected.requests(count)), count)
    paged.tokens.clear()
    expected.check(paged.run(*expected.requests(count)), count)
    full_blocks = sum(len(prompt) // 8 * 8 for prompt in expected.prompts[:count])
    assert paged.scheduler.load().prefix_hit_tokens > 0.8 * full_blocks


@every_architecture
def test_with_preemption_and_eviction(engine, reference, architecture, count):
    expected = reference(architecture)
    paged = engine(architecture, kv_blocks=26, max_batch_tokens=64, window_tables=False)
    count = min(count, 16)
    expected.check(paged.run(*expected.requests(count)), count)
    assert paged.scheduler.load().preemptions > 0
    assert any(isinstance(event, BlockRemoved) for event in paged.events)


@every_architecture
def test_without_native_code(engine, reference, architecture, count, monkeypatch):
    monkeypatch.setattr(step_module, "native_decodes", lambda memory: False)
    expected, paged = reference(architecture), engine(architecture, max_batch_tokens=64)
    count = min(count, 16)
    expected.check(paged.run(*expected.requests(count), concurrency=8), count)


@pytest.mark.parametrize(
    "block_size", [5, *(pytest.param(size, marks=pytest.mark.nightly) for size in (1, 16, 128))]
)
def test_with_blocks_of_any_size(engine, reference, block_size):
    expected = reference("gemma3")
    paged = engine("gemma3", block_size=block_size, max_batch_tokens=100, kv_blocks=1200)
    expected.check(paged.run(*expected.requests(8)), 8)


@pytest.fixture
def no_span_is_rows(monkeypatch):
    """Have even short spans of prompts attend in tiles."""
    monkeypatch.setattr(decoding_module, "_NATIVE_ROW_TOKENS", 0)
    monkeypatch.setattr(decoding_module, "_NATIVE_ROW_PRODUCTS", 0)


@every_architecture
@pytest.mark.parametrize("max_batch_tokens", [29, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("no_span_is_rows")
def test_in_tiles(engine, reference, architecture, count, max_batch_tokens, monkeypatch):
    monkeypatch.setattr(step_module, "_TILE_TOKENS", 16)
    expected, paged = reference(architecture), engine(architecture, max_batch_tokens=max_batch_tokens)
    count = min(count, 12)
    expected.check(paged.run(*expected.requests(count)), count)


@pytest.mark.usefixtures("no_span_is_rows")
def test_tiles_see_every_key_of_their_windows_and_few_others(engine, reference, monkeypatch):
    expected, attend = reference("gemma3"), step_module.dense_attention
    pairs, seen = Counter(), Counter()

    def counting(call, query, keys, values, mask):
        pairs[tile] += int(mask.sum())
        seen[tile] += mask.numel()
        return attend(call, query, keys, values, mask)

    monkeypatch.setattr(step_module, "dense_attention", counting)
    for tile in (1000, 16):
        monkeypatch.setattr(step_module, "_TILE_TOKENS", tile)
        paged = engine("gemma3", max_batch_tokens=100)
        expected.check(paged.run(*expected.requests(12)), 12)
    assert 0 < pairs[16] == pairs[1000] < seen[16] < 0.8 * seen[1000]
