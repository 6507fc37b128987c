"""The adapter and its fake against the names in TensorRT-LLM's own sources (tests/data/trtllm/recorded.json)."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

from penstock.engine.kv_events.engine_events import EngineRemoved, EngineStored, Omissions
from penstock.engine.kv_events.polled import PolledEvents
from penstock.engine.trtllm.outputs import CONTEXT_FIELDS, FIRST_LOGPROBS, Context
from tests.fakes import tensorrt_llm as fake

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "data" / "trtllm" / "recorded.json").read_text()
)
NEWER = {"scheduling_params", "cache_salt", "_postproc_params"}
"""Parameters of 1.1 and later, which the references lack; the adapter asks the installed version for them."""


def test_a_handle_has_what_the_generation_request_needs() -> None:
    fields = {*RECORDED["disaggregated_params"]}
    assert {*CONTEXT_FIELDS} <= fields
    assert {*CONTEXT_FIELDS} == {*RECORDED["context_phase_params"]}, "what ContextPhaseParams is made of"
    assert {*Context.__struct_fields__} == {*CONTEXT_FIELDS, FIRST_LOGPROBS}
    assert FIRST_LOGPROBS in fields


def test_the_fake_has_no_names_of_its_own() -> None:
    made = {field.name for field in dataclasses.fields(fake.DisaggregatedParams)}
    assert made <= {*RECORDED["disaggregated_params"]}
    names = inspect.signature(fake.LLM.generate_async).parameters.keys() - {"self"}
    assert names - NEWER == {*RECORDED["generate_async"]}


def test_kv_events_with_exactly_these_names_are_understood() -> None:
    values: dict[str, Any] = {
        "num_blocks_per_cache_level": [4, 0], "parent_hash": None, "block_hash": 7, "cache_level": 0, "priority": 35,
        "token_extra_id": 0, "block_hashes": [7],
    }  # fmt: skip

    def made(kind: str, **fields: Any) -> dict[str, Any]:
        given = {"type": kind} | values | fields
        return {name: given[name] for name in RECORDED["kv_events"][kind]}

    tokens = [made("unique_token", token_id=number) for number in range(4)]
    diff = made("event_diff", new_value=1, old_value=0)
    data = [
        made("created"),
        made("stored", blocks=[made("stored_block", tokens=tokens)]),
        made("updated", cache_level=diff),
        made("removed"),
    ]
    omissions = Omissions()
    events = PolledEvents(4, omissions).read(
        [
            dict(zip(RECORDED["kv_events"]["event"], (number, each), strict=True))
            for number, each in enumerate(data)
        ]
    )
    assert [type(event) for event in events] == [EngineStored, EngineStored, EngineRemoved, EngineRemoved]
    assert not omissions
