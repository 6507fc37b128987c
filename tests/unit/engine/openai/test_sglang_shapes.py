"""Engine `openai` against what SGLang's own sources say (tests/data/sglang/recorded.json)."""

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import hash_list
from penstock.engine.kv_events.decoder import EventDecoder
from penstock.engine.kv_events.events import Omissions
from penstock.engine.kv_events.translator import KvEventTranslator
from penstock.engine.openai.apis.sglang import SglangGenerate
from penstock.engine.openai.server import SGLANG_TRIAL
from penstock.testing.engines.probe import make_request

DATA = Path(__file__).parents[3] / "data" / "sglang"
RECORDED: dict[str, Any] = json.loads((DATA / "recorded.json").read_text())
CHUNKS = json.loads((DATA / "chunks.json").read_text())
BOOTSTRAP = {"bootstrap_host", "bootstrap_port", "bootstrap_room"}


def asked() -> Request:
    sampling = SamplingParams(
        max_tokens=9, seed=3, logprobs=2, top_k=4, min_p=0.1, temperature=0.5, ignore_eos=True, presence_penalty=0.5,
        frequency_penalty=0.5, repetition_penalty=1.5, stop_token_ids=(9,), min_tokens=2,
    )  # fmt: skip
    return make_request("a", range(5), sampling=sampling, salt=b"|cache_salt=tenant")


def test_the_server_takes_what_the_engine_openai_sends() -> None:
    body = SglangGenerate().body(replace(asked(), rank=1, priority=2), [1, 2, 3])
    assert body.keys() | BOOTSTRAP <= {*RECORDED["generate_request"]}
    assert body["sampling_params"].keys() <= {*RECORDED["sampling_params"]}
    assert body["cache_salt"] == "tenant", "KV events tell this one"
    assert SGLANG_TRIAL["bootstrap_host"] == RECORDED["fake_bootstrap_host"]
    for api in ("completion_request", "chat_request"):
        assert BOOTSTRAP | {"min_tokens", "cache_salt"} <= {*RECORDED[api]}


def test_of_increments_and_of_the_output_so_far_the_new_tokens_are_taken() -> None:
    for name, last in (("increments", 2), ("cumulative", 14)):
        answer, seen = SglangGenerate().answer(asked()), []
        for chunk in CHUNKS[name]:
            piece = answer.read(b"data: " + json.dumps(chunk).encode())
            assert piece is not None
            seen += piece.token_ids
        assert seen == [11, 12, 13, last]


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
