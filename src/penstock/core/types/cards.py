"""Model cards: what a frontend on another host needs to serve a model."""

import msgspec

from penstock.core.types.media import MediaKind
from penstock.core.wire import Wire

CHAT_TEMPLATE = "chat_template.jinja"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE, "chat_template.json")
ADDITIONAL_TEMPLATES = "additional_chat_templates/"
"""Folder of a model's chat templates for other uses, each NAME.jinja."""


class CardFile(Wire, frozen=True):
    """A file of a model card, fetched from any worker of the model by its content hash."""

    name: str
    sha256: str
    size_bytes: int

    @property
    def makes_text(self) -> bool:
        """Whether the model's prompts and the texts of its answers depend on the file."""
        return self.name in TEXT_FILES or self.name.startswith(ADDITIONAL_TEMPLATES)


class ModelCard(Wire, frozen=True):
    """What a frontend on another host needs to serve a model; the files come over the request plane.

    Attributes:
        salt: start of every block-hash chain: model revision and KV dtype.
        default_sampling: the model's own (name, value) defaults, such as temperature.
        parent: base model of a LoRA adapter; None for a base model.
        media: what its engine takes besides text.
    """

    name: str
    context_length: int
    block_size: int
    salt: bytes
    eos_token_ids: tuple[int, ...] = ()
    files: tuple[CardFile, ...] = ()
    created_s: int = 0
    default_sampling: tuple[tuple[str, float], ...] = ()
    parent: str | None = None
    media: tuple[MediaKind, ...] = ()

    def adapted(self, adapter: str) -> "ModelCard":
        """Make the card of a LoRA adapter of this model. Its KV differs, so its `salt` differs too."""
        name = adapter.encode()
        salt = self.salt + b"|adapter=%d:" % len(name) + name
        return msgspec.structs.replace(self, name=adapter, parent=self.name, salt=salt)

    def salted(self, cache_salt: str) -> "ModelCard":
        """Make the card for requests of one tenant, which share no KV with others; a client's own `cache_salt` comes after it."""
        return msgspec.structs.replace(self, salt=request_salt(self.salt, cache_salt))


CLIENT_SALT = b"|cache_salt="
"""Stands before the client's `cache_salt` in `Request.salt`."""


def request_salt(card_salt: bytes, cache_salt: str | None) -> bytes:
    """Combine a card's salt with a request's `cache_salt`: requests with different salts share no blocks."""
    return card_salt if cache_salt is None else card_salt + CLIENT_SALT + cache_salt.encode()
