"""A namespace: what must be equal, besides the block hash, before stored KV may be used."""

import hashlib

import msgspec

from penstock.core.wire import Wire

DIGEST_BYTES = 16


class Namespace(Wire, frozen=True):
    """Identifies the KV in a store. Blocks of different namespaces are never mixed.

    Attributes:
        model_digest: digest of all weights, as hex.
        dtype: of the stored KV.
        layout: order of layers, heads and tokens in a block, and which part of them (tensor parallelism).
        block_size: tokens in a block.
        salt: separates tenants or deployments; only its digest is stored.
        adapter: digest of a LoRA adapter's weights; empty without one.
    """

    model_digest: str
    dtype: str
    layout: str
    block_size: int
    salt: bytes = b""
    adapter: str = ""

    @property
    def digest(self) -> bytes:
        """16 bytes; different namespaces have different ones."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=DIGEST_BYTES).digest()

    @property
    def text(self) -> str:
        """All fields as JSON, for messages; the salt is a digest."""
        salt = hashlib.blake2b(self.salt, digest_size=4).hexdigest() if self.salt else ""
        fields = msgspec.to_builtins(self) | {"salt": salt}
        return msgspec.json.encode(fields).decode()
