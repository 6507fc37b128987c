"""Translates an engine's block hashes into Penstock's, by hashing the tokens in its events.

An engine hashes blocks its own way, with a seed or key that nobody else has. Its hashes only name blocks here: each is mapped to
Penstock's hash of the same tokens, salt and parent, so one prefix index serves workers of all engines.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError
from penstock.core.hashing import DEFAULT_KEY, block_hashes, root_hash
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import hash_list, pack_hashes
from penstock.engine.kv_events.events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    Omission,
    Omissions,
)
from penstock.kv.groups import ToldBlocks

NameOf = Callable[[EngineHash], int | None]
"""Gives the low half of Penstock's hash of a block that an engine has told with its tokens."""


class OtherTables:
    """Blocks of all groups but the first, and what is told of the first group's. One task owns it."""

    def __init__(self, block_size: int, held: Mapping[Tier, Iterable[tuple[int, int | None]]]) -> None:
        """Begin with blocks of the first group that were told: low halves of hashes, and their parents' by tier."""
        self._told = ToldBlocks(block_size)
        for tier, blocks in held.items():
            for key, parent in blocks:
                self._told.of(tier).store(key, parent)
        self._told.take()
        self._groups: dict[int, int] = {}
        """By the engine's number: its number here."""
        self._copies: dict[tuple[Tier, int], dict[EngineHash, int]] = {}
        self._names: dict[EngineHash, int] = {}
        """Of blocks that some group here has."""
        self._unnamed: dict[EngineHash, set[tuple[Tier, int]]] = {}
        """Blocks that were stored before the first group's."""

    def __len__(self) -> int:
        """Number of blocks, by tier and group."""
        return sum(map(len, self._copies.values()))

    def apply(self, event: EngineStored | EngineRemoved, name_of: NameOf) -> None:
        """Note an event of another group."""
        assert event.group is not None, "of the first group"
        if isinstance(event, EngineStored) and event.group not in self._groups:
            self._groups[event.group] = len(self._groups)
            self._told.add_group(event.needed_blocks)
        group = self._groups.get(event.group)
        if group is None:
            return
        place = (event.tier, group)
        copies = self._copies.setdefault(place, {})
        for each in event.hashes:
            count = copies.get(each, 0)
            if isinstance(event, EngineStored):
                copies[each] = count + 1
                if not count:
                    self._store(place, each, name_of(each))
            elif count > 1:
                copies[each] = count - 1
            elif count:
                del copies[each]
                self._remove(place, each)

    def named(self, block_hash: EngineHash, key: int) -> None:
        """Note that the first group has told a block."""
        for place in self._unnamed.pop(block_hash, ()):
            self._store(place, block_hash, key)

    def translate(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Note events of the first group, and return what routers are told of all since the last call."""
        for event in events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    for each in hash_list(event.block_hashes):
                        self._told.of(event.tier).store(each, parent)
                        parent = each
                case BlockRemoved():
                    for each in hash_list(event.block_hashes):
                        self._told.of(event.tier).remove(each)
                case AllBlocksCleared():
                    raise AssertionError("tables begin after it")
        return self._told.take()

    def _store(self, place: tuple[Tier, int], block_hash: EngineHash, key: int | None) -> None:
        if key is None:
            self._unnamed.setdefault(block_hash, set()).add(place)
            return
        self._names[block_hash] = key
        self._told.of(place[0]).store_other(place[1], key)

    def _remove(self, place: tuple[Tier, int], block_hash: EngineHash) -> None:
        if (unnamed := self._unnamed.get(block_hash)) is not None:
            unnamed.discard(place)
            if not unnamed:
                del self._unnamed[block_hash]
            return
        self._told.of(place[0]).remove_other(place[1], self._names[block_hash])
        if not any(block_hash in copies for copies in self._copies.values()):
            del self._names[block_hash]


SaltOf = Callable[[str | None, str | None], bytes | None]
"""(cache_salt, lora_name) of an engine's block -> `Request.salt` of such prompts; None: no request here has it."""

BLOCKS_MAX = 4_000_000
"""Blocks that one engine is believed to hold."""
_FORGOTTEN_MAX = 65_536
"""Blocks no longer held whose hashes are kept: an engine may name them again without their tokens."""
_ROOTS_MAX = 4096

_Named = tuple[int, int, int | None]
"""Penstock's hash of a block (low and high half), and its parent's low half."""


@dataclass(frozen=True, slots=True)
class HexSalts:
    """A `SaltOf` for engines that get `Request.salt.hex()` as a request's cache salt.

    Attributes:
        default: salt of prompts without a cache salt: those that others sent to the engine.
        adapters: the same for LoRA adapters, by name.
    """

    default: bytes = b""
    adapters: Mapping[str, bytes] = field(default_factory=dict)

    def __call__(self, cache_salt: str | None, lora_name: str | None) -> bytes | None:
        if cache_salt is None:
            return self.default if lora_name is None else self.adapters.get(lora_name)
        try:
            return bytes.fromhex(cache_salt)
        except ValueError:
            return None


class KvEventTranslator:
    """Turns the events of one engine into `KvEvent`s. Pure; one task owns it.

    An engine may hold several copies of a block, and removes each. Here the copies are counted by tier and hash, and only the
    first and the last one become events: a block is told stored once, so that counts in an index never overflow.

    In a model with several groups of layers a block is told while it leads to a prefix that every group still has.
    """

    def __init__(
        self,
        *,
        block_size: int,
        salt_of: SaltOf,
        omissions: Omissions,
        hash_key: bytes = DEFAULT_KEY,
        blocks_max: int = BLOCKS_MAX,
    ) -> None:
        """Make a translator.

        Args:
            block_size: tokens in a block.
            salt_of: finds a prompt's salt.
            omissions: counts what is left out.
            hash_key: the deployment's.
            blocks_max: blocks to know at most; further ones are left out.
        """
        self._block_size = block_size
        self._salt_of = salt_of
        self._key = hash_key
        self._blocks_max = blocks_max
        self._omissions = omissions
        self._named: dict[EngineHash, _Named] = {}
        self._forgotten: dict[EngineHash, _Named] = {}
        self._copies: dict[Tier, dict[EngineHash, int]] = {tier: {} for tier in Tier}
        self._roots: dict[bytes, tuple[int, int]] = {}
        self._tables: OtherTables | None = None
        """None before an event of a second group."""

    def __len__(self) -> int:
        """Number of blocks held in any tier."""
        return len(self._named)

    def translate(self, events: Iterable[EngineEvent]) -> list[KvEvent]:
        """Translate events in their order; the result may have fewer or more of them."""
        before: list[KvEvent] = []  # the engine told of a second group
        out: list[KvEvent] = []
        removed: list[int] = []  # of `tier`, of successive events
        tier = Tier.DEVICE
        for event in events:
            if not isinstance(event, EngineCleared) and event.group is not None:
                if self._tables is None:
                    _flush(removed, tier, out)
                    before, out = out, []
                    self._tables = OtherTables(self._block_size, self._held())
                self._note_other(self._tables, event)
                continue
            if isinstance(event, EngineRemoved):
                if event.tier is not tier:
                    _flush(removed, tier, out)
                    tier = event.tier
                self._remove(event, removed)
                continue
            _flush(removed, tier, out)
            if isinstance(event, EngineCleared):
                self._forget_all()
                out = [AllBlocksCleared()]
            elif event.token_ids:
                self._store(event, out)
            else:
                self._store_named(event, out)
        _flush(removed, tier, out)
        return out if self._tables is None else before + self._tables.translate(out)

    def clear(self) -> list[KvEvent]:
        """Forget everything, after events were lost. What the engine stores from now on becomes known again."""
        had_any = bool(self._named)
        self._forget_all()
        return [AllBlocksCleared()] if had_any else []

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        held = set().union(*self._copies.values())
        assert held == self._named.keys(), "translator: exactly the blocks held have a name"
        assert not held & self._forgotten.keys(), "translator: a block is held or forgotten"
        assert all(count > 0 for copies in self._copies.values() for count in copies.values())
        assert len(self._forgotten) <= _FORGOTTEN_MAX

    def _held(self) -> dict[Tier, list[tuple[int, int | None]]]:
        """Give all blocks with their parents, by the low halves of their hashes."""
        return {
            tier: [(low, parent) for low, _, parent in map(self._named.__getitem__, copies)]
            for tier, copies in self._copies.items()
        }

    def _note_other(self, tables: OtherTables, event: EngineStored | EngineRemoved) -> None:
        """Note blocks of another group than the first."""
        if isinstance(event, EngineStored) and len(tables) >= self._blocks_max:
            self._omissions[Omission.FULL] += len(event.hashes)
        else:
            tables.apply(event, self._name_of)

    def _name_of(self, block_hash: EngineHash) -> int | None:
        named = self._named.get(block_hash) or self._forgotten.get(block_hash)
        return None if named is None else named[0]

    def _store(self, event: EngineStored, out: list[KvEvent]) -> None:
        parent = event.parent
        if parent is None:
            first = self._root(event)
            parent_low = None
            if first is None:
                self._omissions[Omission.SALT] += len(event.hashes)
                return
        else:
            named = self._named.get(parent) or self._forgotten.get(parent)
            if named is None:
                self._omissions[Omission.UNKNOWN_PARENT] += len(event.hashes)
                return
            first, parent_low = named[:2], named[0]
        ours = block_hashes(event.token_ids, self._block_size, extra=event.media, key=self._key, parent=first)
        chain: list[_Named] = []
        for low, high in ours.tolist():
            chain.append((low, high, parent_low))
            parent_low = low
        self._add(event, chain, out)

    def _store_named(self, event: EngineStored, out: list[KvEvent]) -> None:
        """Store blocks of an event without tokens, if an earlier event had their tokens."""
        for block_hash in event.hashes:
            named = self._named.get(block_hash) or self._forgotten.get(block_hash)
            if named is None:
                self._omissions[Omission.UNKNOWN_BLOCK] += 1
            else:
                self._add(EngineStored([block_hash], tier=event.tier), [named], out)

    def _add(self, event: EngineStored, chain: list[_Named], out: list[KvEvent]) -> None:
        """Count one more copy of each block; make events of those that were not in this tier."""
        names, copies = self._named, self._copies[event.tier]
        run: list[int] = []
        run_parent: int | None = None
        for index, (block_hash, named) in enumerate(zip(event.hashes, chain, strict=True)):
            known = names.get(block_hash)
            if known is None:
                if len(names) >= self._blocks_max:
                    self._omissions[Omission.FULL] += len(chain) - index
                    break
                names[block_hash] = named
                self._forgotten.pop(block_hash, None)
                if self._tables is not None:
                    self._tables.named(block_hash, named[0])
            elif known[0] != named[0]:
                self._omissions[Omission.CONTRADICTION] += len(chain) - index
                break
            count = copies.get(block_hash, 0)
            copies[block_hash] = count + 1
            if not count:
                if not run:
                    run_parent = named[2]
                run.append(named[0])
            elif run:
                self._tell(run, run_parent, event.tier, out)
                run = []
        if run:
            self._tell(run, run_parent, event.tier, out)

    def _tell(self, run: list[int], parent: int | None, tier: Tier, out: list[KvEvent]) -> None:
        out.append(
            BlockStored(
                block_hashes=pack_hashes(run),
                parent_block_hash=parent,
                block_size=self._block_size,
                tier=tier,
            )
        )

    def _remove(self, event: EngineRemoved, removed: list[int]) -> None:
        names, copies = self._named, self._copies[event.tier]
        for block_hash in event.hashes:
            count = copies.get(block_hash)
            if count is None:
                self._omissions[Omission.UNKNOWN_BLOCK] += 1
            elif count > 1:
                copies[block_hash] = count - 1
            else:
                del copies[block_hash]
                removed.append(names[block_hash][0])
                if not any(block_hash in others for others in self._copies.values()):
                    self._forget(block_hash)

    def _forget(self, block_hash: EngineHash) -> None:
        if len(self._forgotten) >= _FORGOTTEN_MAX:
            del self._forgotten[next(iter(self._forgotten))]
        self._forgotten[block_hash] = self._named.pop(block_hash)

    def _forget_all(self) -> None:
        self._named.clear()
        self._forgotten.clear()
        for copies in self._copies.values():
            copies.clear()
        self._tables = None  # a garbled event may have told of a group that is none

    def _root(self, event: EngineStored) -> tuple[int, int] | None:
        """Give the parent of a prompt's first block."""
        salt = self._salt_of(event.cache_salt, event.lora_name)
        if salt is None:
            return None
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= _ROOTS_MAX:
                self._roots.clear()
            root = self._roots[salt] = root_hash(self._block_size, salt, key=self._key)
        return root


def check_block_size(engine: int, model: int) -> None:
    """Check that an engine's blocks are those of the model's card, whose hashes routers compute.

    Raises:
        ConfigError: the sizes differ.
    """
    if engine != model:
        raise ConfigError(
            f"block_size: the engine's KV blocks have {engine} tokens and the model's {model}, so routers could not match"
            f" prompts with KV events; set block_size: {engine}, or start the engine with {model}"
        )


def _flush(removed: list[int], tier: Tier, out: list[KvEvent]) -> None:
    if removed:
        out.append(BlockRemoved(block_hashes=pack_hashes(removed), tier=tier))
        removed.clear()
