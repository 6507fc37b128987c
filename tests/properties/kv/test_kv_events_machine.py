"""The prefix index, fed with an engine's translated events, equals the engine's pool after any history."""

from collections import Counter

import hypothesis.strategies as st
import msgspec
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.hashing import block_hashes
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import hash_list
from penstock.engine.kv_events.decoder import EventDecoder
from penstock.engine.kv_events.events import Omission, Omissions
from penstock.engine.kv_events.translator import HexSalts, KvEventTranslator
from penstock.router.radix import RadixTree

SIZE = 2
KEY = bytes(range(16))
MEDIA = {"GPU": Tier.DEVICE, "CPU": Tier.HOST}
Prefix = tuple[bytes, tuple[int, ...]]
"""A block by its content: the salt, and all tokens up to its end."""


class FakeEngine:
    """A pool with physical blocks: equal prefixes may lie in several of them. It names blocks by hashes of its own."""

    def __init__(self) -> None:
        self.held: list[tuple[str, Prefix]] = []
        self.names: dict[Prefix, int | bytes] = {}

    def name(self, prefix: Prefix) -> int | bytes:
        if prefix not in self.names:
            number = len(self.names)
            self.names[prefix] = [2**64 - 1 - number, -1000 - number, number.to_bytes(32, "big")][number % 3]
        return self.names[prefix]

    def store(self, salt: bytes, tokens: tuple[int, ...], first: int, medium: str, *, is_map: bool) -> object:
        """Store blocks from number `first` on."""
        prefixes = [(salt, tokens[: end * SIZE]) for end in range(first + 1, len(tokens) // SIZE + 1)]
        self.held += [(medium, prefix) for prefix in prefixes]
        parent = self.name((salt, tokens[: first * SIZE])) if first else None
        hashes = [self.name(prefix) for prefix in prefixes]
        keys = [[salt.hex()] if salt and not first and not index else None for index in range(len(prefixes))]
        told = tokens[first * SIZE : len(tokens) // SIZE * SIZE]
        if not is_map:
            return ["BlockStored", hashes, parent, told, SIZE, None, medium, None, keys]
        return {
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": told,
            "block_size": SIZE, "lora_id": None, "medium": medium, "extra_keys": keys,
        }  # fmt: skip

    def expected(self) -> set[tuple[int, Tier]]:
        return {
            (hash_list(block_hashes(tokens, SIZE, salt, key=KEY)[:, 0])[-1], MEDIA[medium])
            for medium, (salt, tokens) in self.held
        }


def index(tree: RadixTree, events: list[KvEvent]) -> None:
    for event in events:
        match event:
            case BlockStored():
                assert event.block_size == SIZE
                tree.store(0, event.block_hashes, event.parent_block_hash, event.tier)
            case BlockRemoved():
                tree.remove(0, event.block_hashes, event.tier)
            case AllBlocksCleared():
                tree.clear(0)


class KvEventsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine()
        self.omissions: Omissions = Counter()
        self.decoder = EventDecoder(SIZE, self.omissions)
        self.translator = KvEventTranslator(
            block_size=SIZE, salt_of=HexSalts(), omissions=self.omissions, hash_key=KEY
        )
        self.tree = RadixTree(10_000)
        self.told = 0

    def send(self, *events: object) -> None:
        (batch,) = self.decoder.decode(msgspec.msgpack.encode([0.5, events, 0]))
        translated = self.translator.translate(batch)
        self.told += sum(isinstance(event, BlockStored) for event in translated)
        index(self.tree, translated)

    @rule(
        salt=st.sampled_from([b"", b"a", b"bc"]),
        tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=11),
        copies=st.integers(1, 3),
        medium=st.sampled_from(list(MEDIA)),
        is_map=st.booleans(),
    )
    def store_prompt(self, salt: bytes, tokens: list[int], copies: int, medium: str, is_map: bool) -> None:
        self.send(*(self.engine.store(salt, tuple(tokens), 0, medium, is_map=is_map) for _ in range(copies)))

    @precondition(lambda self: self.engine.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=6))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        medium, (salt, known) = data.draw(st.sampled_from(self.engine.held))
        self.send(self.engine.store(salt, (*known, *tokens), len(known) // SIZE, medium, is_map=True))

    @precondition(lambda self: self.engine.held)
    @rule(data=st.data(), count=st.integers(1, 6))
    def evict(self, data: st.DataObject, count: int) -> None:
        events = []
        for _ in range(min(count, len(self.engine.held))):
            at = data.draw(st.integers(0, len(self.engine.held) - 1))
            medium, prefix = self.engine.held.pop(at)
            names = [self.engine.name(prefix)]
            events.append({"type": "BlockRemoved", "block_hashes": names, "medium": medium, "group_idx": 0})
        self.send(*events)

    @precondition(lambda self: self.engine.held)
    @rule(data=st.data())
    def offload_by_name(self, data: st.DataObject) -> None:
        """As vLLM's offloading tells blocks that it did not watch: no tokens, no parent."""
        _, prefix = data.draw(st.sampled_from(self.engine.held))
        self.engine.held.append(("CPU", prefix))
        self.send({
            "type": "BlockStored", "block_hashes": [self.engine.name(prefix)], "parent_block_hash": None,
            "token_ids": [], "block_size": 0, "lora_id": None, "medium": "CPU",
        })  # fmt: skip

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=6))
    def reset(self, tokens: list[int]) -> None:
        self.engine.held.clear()
        self.send({"type": "AllBlocksCleared"}, self.engine.store(b"", tuple(tokens), 0, "GPU", is_map=True))

    @invariant()
    def index_equals_pool(self) -> None:
        self.translator.check()
        held = {
            (block_hash, tier)
            for hashes, _, copies in self.tree.runs(0)
            for tier, count in zip(Tier, copies, strict=True)
            if count
            for block_hash in hash_list(hashes)
        }
        assert held == self.engine.expected()
        stats = self.tree.stats()
        assert not stats.unknown_removals
        assert not stats.contradictions
        assert set(self.omissions) <= {Omission.UNKNOWN_FIELD}
        assert len(self.translator) == len({prefix for _, prefix in self.engine.held})


TestKvEvents = KvEventsMachine.TestCase
