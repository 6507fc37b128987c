"""Penstock's tiers as TensorRT-LLM's KV cache connector, by an executor that keeps to its interface."""

import itertools
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from tests.support.connected import damage

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.fakes import kv_cache_connector as fake

    names = ["tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.pyexecutor"]
    for name in names:
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, f"{names[-1]}.kv_cache_connector", fake)
    sys.modules.pop("penstock.engine.trtllm.kv_connector", None)
    monkeypatch.setenv("PENSTOCK_KV_CONNECTOR", json.dumps({"kv": {"host": "1MiB"}, "model": "m"}))
    from penstock.engine.trtllm import kv_connector

    monkeypatch.setattr(kv_connector, "_STAGING_BYTES", 1 << 20)
    yield kv_connector
    if kv_connector._SHARED.tiers is not None:
        kv_connector._SHARED.tiers.close()
    sys.modules.pop("penstock.engine.trtllm.kv_connector", None)


@pytest.fixture
def executor(connector: Any) -> Any:
    from tests.fakes.kv_cache_connector import Executor

    class Settling(Executor):
        """Waits for the tiers too: a save has ended once its blocks are read, and the tiers may still store them."""

        def settle(self) -> None:
            super().settle()
            assert connector._SHARED.tiers.wait(30.0)

    return Settling(connector.PenstockScheduler, connector.PenstockWorker)


def request(number: int, tokens: list[int], **fields: Any) -> Any:
    from tests.fakes.kv_cache_connector import Request

    return Request(number, tokens, **fields)


NUMBERS = itertools.count(2)


def comes(executor: Any, count: int, prompt: Callable[[int], list[int]]) -> bool:
    """Run prompts until one loads so many tokens: a busy machine gives up loads that come late."""
    for number in itertools.islice(NUMBERS, 50):
        if executor.run(request(number, prompt(number))) == count:
            return True
        executor.settle()
    return False


def test_a_prefix_that_was_saved_arrives_before_the_forward_pass(executor: Any) -> None:
    tokens = list(range(23))
    assert executor.run(request(1, tokens)) == 0
    executor.settle()
    assert comes(executor, 20, lambda _: tokens), "its full blocks"
    assert comes(executor, 16, lambda number: [*tokens[:16], *[number] * 5])
    executor.settle()


def test_a_prompt_of_full_blocks_computes_its_last_one(executor: Any) -> None:
    tokens = list(range(16))
    executor.run(request(1, [*tokens, 1, 2, 3, 4, 5]))
    executor.settle()
    assert comes(executor, 12, lambda _: tokens)
    executor.settle()


@pytest.mark.parametrize("fields", [{"lora_task_id": 1}, {"cache_salt_id": 7}, {"multimodal_hashes": [[1]]}])
def test_adapters_salts_and_images_are_set_apart(executor: Any, fields: dict[str, Any]) -> None:
    tokens = list(range(20))
    executor.run(request(1, tokens))
    executor.settle()
    assert executor.run(request(2, tokens, **fields)) == 0
    executor.settle()


@pytest.mark.slow
def test_a_corrupt_block_is_never_promised(executor: Any, connector: Any) -> None:
    tokens = list(range(24))
    executor.run(request(1, tokens))
    executor.settle()
    (tier,) = connector._SHARED.tiers.tiers
    hashes = executor.scheduler._hashes(request(0, tokens))
    damage(tier, hashes[2:3])
    assert executor.run(request(2, tokens)) == 8
    executor.settle()


def test_a_request_that_is_asked_for_and_never_run_holds_nothing(executor: Any) -> None:
    """TensorRT-LLM tells no connector of a request that is cancelled before it gets blocks."""
    tokens = list(range(40))
    executor.run(request(1, tokens))
    executor.settle()
    scheduler = executor.scheduler
    matched = []
    for number in range(2, 600):  # more than there is room for
        matched.append(scheduler.get_num_new_matched_tokens(request(number, tokens), 0)[0])
        if number % 2:
            scheduler.request_finished(request(number, tokens), [])
        else:
            assert not scheduler.build_connector_meta(None)
    assert 36 in matched[-50:], "a busy machine gives up some that come late"
    executor.settle()


def test_several_devices_and_missing_settings_are_refused(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fakes.kv_cache_connector import Executor

    with pytest.raises(ConfigError, match="a model on 2 devices"):
        Executor(connector.PenstockScheduler, connector.PenstockWorker, tensor_parallel_size=2)
    for settings in ("", "{}", "host: 8GiB", "[8]", "8"):
        monkeypatch.setenv("PENSTOCK_KV_CONNECTOR", settings)
        with pytest.raises(ConfigError, match="must be JSON with kv and model"):
            Executor(connector.PenstockScheduler, connector.PenstockWorker)
