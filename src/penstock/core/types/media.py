"""Images, audio and video of a prompt, and the prompt that an engine makes of them."""

import hashlib

from penstock.core.wire import PackedTokens, Wire

MODALITIES = ("image", "audio", "video")


class MediaKind(Wire, frozen=True):
    """What an engine takes of one modality.

    Attributes:
        modality: one of `MODALITIES`.
        placeholder: text that stands for an item in the prompt of a model whose chat template only takes strings.
        items_max: items of one request.
    """

    modality: str
    placeholder: str
    items_max: int


class MediaItem(Wire, frozen=True):
    """One file, as the client encoded it.

    Attributes:
        data: a PNG, WAV, MP4 and the like; decoded by the engine alone.
        digest: of modality and data; equal digests share KV.
        position: index in `Request.token_ids` of the item's first token; set once an engine has expanded the prompt.
    """

    modality: str
    data: bytes
    digest: bytes
    position: int = 0

    @classmethod
    def of(cls, modality: str, data: bytes) -> "MediaItem":
        """Make an item with its digest; hashes 1 MB in about a millisecond."""
        return cls(
            modality=modality, data=data, digest=hashlib.sha256(b"%s:%b" % (modality.encode(), data)).digest()
        )


class MediaPrompt(Wire, frozen=True):
    """A tokenized prompt with one placeholder for each item, and the items in the order of their placeholders."""

    token_ids: PackedTokens
    items: tuple[MediaItem, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all items."""
        return sum(len(item.data) for item in self.items)

    def extra(self) -> list[tuple[int, bytes]]:
        """Give what the block hashes of an expanded prompt cover besides its tokens, as `block_hashes` takes it."""
        return sorted((item.position, item.digest) for item in self.items)


class ExpandedPrompt(Wire, frozen=True):
    """The tokens that an engine computes for a `MediaPrompt`: an item takes as many as the engine has embeddings for.

    Attributes:
        positions: index in `token_ids` of the first token of each item, in the order of the items.
    """

    token_ids: PackedTokens
    positions: tuple[int, ...]
