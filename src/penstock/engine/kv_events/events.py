"""KV events of other engines, in one form for all engines and encodings. Hashes are the engine's own."""

from collections import Counter
from enum import StrEnum

import msgspec

from penstock.core.types.events import Tier
from penstock.core.wire import NO_TOKENS, PackedTokens

EngineHash = int | bytes
"""An engine's own name of a block: an unsigned 64-bit integer, or up to 64 raw bytes."""

_WORD = 1 << 64


class EngineStored(msgspec.Struct, frozen=True, gc=False):
    """One more copy of each block of a chain is in `tier`.

    Attributes:
        hashes: each block is the child of the one before it.
        parent: of the first block; None: the first block begins a prompt, or `token_ids` is empty.
        token_ids: of all blocks, `block_size` each; empty: the engine only names blocks that it has described before.
        lora_name: the LoRA adapter that computed the blocks.
        cache_salt: of the first block, if it begins a prompt.
        media: (index in `token_ids`, digest) of each image and the like that begins in these blocks, ascending.
        group: the engine's number of the group of layers; None: the first one over the whole context.
        needed_blocks: last blocks of a prefix that the group needs; None: all. For other groups than the first.
    """

    hashes: list[EngineHash]
    parent: EngineHash | None = None
    token_ids: PackedTokens = NO_TOKENS
    block_size: int = 0
    tier: Tier = Tier.DEVICE
    lora_name: str | None = None
    cache_salt: str | None = None
    media: tuple[tuple[int, bytes], ...] = ()
    group: int | None = None
    needed_blocks: int | None = None


class EngineRemoved(msgspec.Struct, frozen=True, gc=False):
    """One copy less of each block is in `tier`; `group` is as in `EngineStored`."""

    hashes: list[EngineHash]
    tier: Tier = Tier.DEVICE
    group: int | None = None


class EngineCleared(msgspec.Struct, frozen=True, gc=False):
    """No block is left in any tier."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class Omission(StrEnum):
    """Why a part of an engine's events is ignored; the unit of its count is in parentheses."""

    MALFORMED = "malformed"  # (messages) not in any known encoding
    UNKNOWN_TYPE = "unknown_type"  # (events) of a type that this version does not know
    UNKNOWN_FIELD = "unknown_field"  # (fields) that this version does not know
    MEDIUM = "medium"  # (blocks) in a medium that this version does not know
    GROUP = "group"  # (blocks) of layers with states, chunked attention, or blocks of another size than the first group's
    CONTENT = "content"  # (blocks) whose content is neither tokens nor media, and those after them
    PARTIAL = "partial"  # (blocks) that are not full, or whose event has too few tokens
    BLOCK_SIZE = "block_size"  # (blocks) of another size than the model's
    SALT = "salt"  # (blocks) with a salt or adapter that no request here has
    UNKNOWN_PARENT = "unknown_parent"  # (blocks) after one whose event was missed
    UNKNOWN_BLOCK = "unknown_block"  # (blocks) removed or named without having been described
    CONTRADICTION = "contradiction"  # (blocks) whose hash had other tokens before
    FULL = "full"  # (blocks) beyond `blocks_max`
    LOST = "lost"  # (gaps) of events that cannot be replayed: all blocks were forgotten
    RESTART = "restart"  # (times) the engine restarted


Omissions = Counter[Omission]


def unsigned(block_hash: int) -> int:
    """Give a signed or unsigned 64-bit hash as an unsigned one."""
    return block_hash + _WORD if block_hash < 0 else block_hash
