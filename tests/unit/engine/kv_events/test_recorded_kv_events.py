"""What vLLM 0.32 sent: the index knows after each request what the engine found in its cache."""

import json
from base64 import b64decode
from collections import Counter
from pathlib import Path

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.core.wire import hash_list
from penstock.engine.kv_events.decoder import EventDecoder
from penstock.engine.kv_events.events import Omissions
from penstock.engine.kv_events.translator import HexSalts, KvEventTranslator
from penstock.router.radix import RadixTree

RECORDED = json.loads((Path(__file__).parents[3] / "data" / "vllm_kv_events.json").read_text())
SIZE = RECORDED["block_size"]


def names(tokens: list[int], salt: str | None) -> list[int]:
    return hash_list(block_hashes(tokens, SIZE, bytes.fromhex(salt or ""))[:, 0])


def apply(tree: RadixTree, events: list[KvEvent]) -> None:
    for event in events:
        match event:
            case BlockStored():
                tree.store(0, event.block_hashes, event.parent_block_hash, event.tier)
            case BlockRemoved():
                tree.remove(0, event.block_hashes, event.tier)
            case AllBlocksCleared():
                tree.clear(0)


def test_every_block_is_one_of_a_request_and_hits_are_foreseen() -> None:
    omissions: Omissions = Counter()
    decoder = EventDecoder(SIZE, omissions)
    translator = KvEventTranslator(block_size=SIZE, salt_of=HexSalts(), omissions=omissions)
    tree = RadixTree(1000)
    requests = RECORDED["requests"]
    wanted = {name for each in requests for name in names(each["prompt"] + each["output"], each["salt"])}
    told: Counter[int] = Counter()
    batches = iter(RECORDED["live"])
    removed = 0
    for request in requests:
        prompt = names(request["prompt"], request["salt"])
        held = tree.match_tokens(request["prompt"], SIZE, bytes.fromhex(request["salt"] or "")).depths
        known = int(held[0]) * SIZE if len(held) else 0
        # vLLM computes at least one token of a prompt, so the block with its last one.
        assert request["cached"] == min(known, (len(request["prompt"]) - 1) // SIZE * SIZE)
        while lacks(tree, prompt):  # what comes late with the next request's
            (batch,) = decoder.decode(b64decode(next(batches)[2]))
            events = translator.translate(batch)
            apply(tree, events)
            for event in events:
                if isinstance(event, BlockStored):
                    told.update(hash_list(event.block_hashes))
                removed += isinstance(event, BlockRemoved)
            translator.check()
    assert set(told) <= wanted
    assert removed
    assert not omissions


def lacks(tree: RadixTree, names_of_prompt: list[int]) -> bool:
    held = set(hash_list(tree.hashes_of(0))) if tree.num_slots else set()
    return not held.issuperset(names_of_prompt)


def test_a_replay_repeats_the_messages_and_ends() -> None:
    frames = [[b64decode(frame) for frame in message] for message in RECORDED["replay"]]
    live = [[b64decode(frame) for frame in message] for message in RECORDED["live"]]
    assert [[b"", *message] for message in live] == frames[:-1]
    assert frames[-1] == [b"", b"", b"\xff" * 8, b""]
