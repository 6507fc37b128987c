"""The adapters and their fakes against what SGLang's own sources say (tests/data/sglang/recorded.json)."""

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.types.requests import FinishReason, SamplingParams
from penstock.core.wire import hash_list
from penstock.engine.kv_events.decoder import EventDecoder
from penstock.engine.kv_events.engine_events import Omissions
from penstock.engine.kv_events.translator import KvEventTranslator
from penstock.engine.openai.apis.sglang import SglangGenerate
from penstock.engine.openai.pairs import SGLANG_TRIAL
from penstock.engine.sglang.outputs import generate_arguments, read_chunk
from penstock.engine.streams.backend import Call
from penstock.testing.engines.probe import make_request
from tests.fakes import sglang as fake

DATA = Path(__file__).parents[3] / "data" / "sglang"
RECORDED: dict[str, Any] = json.loads((DATA / "recorded.json").read_text())
CHUNKS = json.loads((DATA / "chunks.json").read_text())
BOOTSTRAP = {"bootstrap_host", "bootstrap_port", "bootstrap_room"}


def call_of(logprobs: int | None = 2) -> Call:
    sampling = SamplingParams(
        max_tokens=9, seed=3, logprobs=logprobs, top_k=4, min_p=0.1, temperature=0.5, ignore_eos=True, presence_penalty=0.5,
        frequency_penalty=0.5, repetition_penalty=1.5, stop_token_ids=(9,), min_tokens=2,
    )  # fmt: skip
    request = make_request("a", range(5), sampling=sampling, salt=b"|cache_salt=tenant")
    request = msgspec.structs.replace(request, adapter="sql")
    ids = list(range(5))
    return Call(
        number=1, request=request, token_ids=ids, sampling=sampling, max_new_tokens=9, min_new_tokens=2
    )


def test_the_package_takes_what_the_adapter_gives() -> None:
    given = generate_arguments(call_of(), "rid")
    assert given.keys() | BOOTSTRAP <= {*RECORDED["async_generate"]}
    assert given["sampling_params"].keys() <= {*RECORDED["sampling_params"]}


def test_the_fake_package_takes_nothing_that_the_package_does_not() -> None:
    names = inspect.signature(fake.Engine.async_generate).parameters.keys() - {"self"}
    assert names <= {*RECORDED["async_generate"]}


def test_the_server_takes_what_the_engine_openai_sends() -> None:
    body = SglangGenerate().body(call_of().request, [1, 2, 3])
    assert body.keys() | BOOTSTRAP <= {*RECORDED["generate_request"]}
    assert body["sampling_params"].keys() <= {*RECORDED["sampling_params"]}
    assert body["cache_salt"] == "tenant", "KV events tell this one"
    assert SGLANG_TRIAL["bootstrap_host"] == RECORDED["fake_bootstrap_host"]
    for api in ("completion_request", "chat_request"):
        assert BOOTSTRAP | {"min_tokens", "cache_salt"} <= {*RECORDED[api]}


def test_chunks_have_the_packages_own_keys() -> None:
    metas = [chunk["meta_info"] for value in CHUNKS.values() if isinstance(value, list) for chunk in value]
    metas += [CHUNKS["logprobs"]["meta_info"]]
    for meta in metas:
        assert meta.keys() <= {*RECORDED["meta_info"]}
        reason = meta["finish_reason"]
        assert reason is None or reason.keys() == RECORDED["finish_reasons"][reason["type"]].keys()


def test_finish_reasons_are_understood() -> None:
    def read(name: str) -> Any:
        meta = {"completion_tokens": 1, "finish_reason": RECORDED["finish_reasons"][name]}
        return read_chunk({"output_ids": [2], "meta_info": meta}, call_of(logprobs=None), (2,)).finish_reason

    assert (read("stop"), read("length")) == (FinishReason.STOP, FinishReason.LENGTH)
    with pytest.raises(RequestError, match="no room"):
        read("abort")


def test_kv_events_of_the_packages_own_classes_are_understood() -> None:
    """Signed hashes, a salt and an adapter that are fields of their own, and every medium."""
    omissions = Omissions()
    salts = {(None, None): b"", ("6162", None): b"tenant", (None, "sql"): b"sql"}
    decoder = EventDecoder(4, omissions)
    translator = KvEventTranslator(
        block_size=4, salt_of=lambda salt, lora: salts[salt, lora], omissions=omissions
    )

    def events(name: str) -> list[KvEvent]:
        parts = decoder.decode(bytes.fromhex(RECORDED["kv_events"][name]))
        return [event for part in parts for event in translator.translate(part)]

    tokens = list(range(11, 19))
    plain = hash_list(block_hashes(tokens, 4)[:, 0])
    stored = [event for event in events("stored") if isinstance(event, BlockStored)]
    assert [hash_list(event.block_hashes) for event in stored] == [
        plain,
        hash_list(block_hashes(tokens[:4], 4, b"tenant")[:, 0]),
        hash_list(block_hashes(tokens[:4], 4, b"sql")[:, 0]),
        hash_list(block_hashes([*tokens, 21, 22, 23, 24], 4)[2:, 0]),
    ]
    assert [event.tier for event in stored] == [Tier.DEVICE] * 3 + [Tier.HOST]
    (removed,) = events("removed")
    assert isinstance(removed, BlockRemoved)
    assert hash_list(removed.block_hashes) == plain[:1]
    assert [type(event) for event in events("cleared")] == [AllBlocksCleared]
    assert not omissions, "nothing of it is unknown here"
    translator.check()
