"""vLLM's requests by Penstock's block hashes: tiers, routers and the disk of an earlier worker name a block alike."""

from typing import Any, NamedTuple

import numpy as np

from penstock.core.hashing import block_hashes
from penstock.core.wire import HashArray


class PromptHashes:
    """The block hashes of live requests, made longer as tokens come. Not thread-safe."""

    def __init__(self, block_size: int, key: bytes) -> None:
        self._block_size = block_size
        self._key = key
        self._known: dict[str, HashArray] = {}

    def of(self, request: Any) -> HashArray | None:
        """Return the (n, 2) uint64 hashes of all full blocks of vLLM's Request; None if its KV depends on more than tokens."""
        if request.mm_features or request.prompt_embeds is not None:
            return None
        hashes = self._known.get(request.request_id)
        size = self._block_size
        num_known = 0 if hashes is None else len(hashes)
        if request.num_tokens // size > num_known:
            tokens = np.asarray(request.all_token_ids[num_known * size :], dtype=np.int32)
            parent = None if hashes is None or not num_known else tuple(hashes[-1].tolist())
            more = block_hashes(tokens, size, _salt(request), key=self._key, parent=parent)
            hashes = more if hashes is None else np.concatenate([hashes, more])
            self._known[request.request_id] = hashes
        return hashes if hashes is not None else np.empty((0, 2), np.uint64)

    def forget(self, request_id: str) -> None:
        """Forget a request."""
        self._known.pop(request_id, None)


class StepTokens(NamedTuple):
    """What a step computes.

    Attributes:
        prompt: prompt tokens, and those of preempted requests that are computed again.
        decode: one token for each sequence that generates, and the tokens drafted after it.
        context: the sum of these sequences' lengths.
    """

    prompt: int
    decode: int
    context: int

    @classmethod
    def of(cls, output: Any) -> "StepTokens":
        """Count the tokens of vLLM's SchedulerOutput."""
        drafts, begun = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
        decode = context = 0
        for name, computed, generated in zip(
            begun.req_ids, begun.num_computed_tokens, begun.num_output_tokens, strict=True
        ):
            tokens = output.num_scheduled_tokens[name]
            if generated and tokens <= 1 + len(drafts.get(name, ())):
                decode += tokens
                context += computed
        return cls(output.total_num_scheduled_tokens - decode, decode, context)


def _salt(request: Any) -> bytes:
    """Give the salt of a prompt's hashes: that of the router, which names the adapter too.

    Where a request has an adapter that its salt does not name, the name is added as `ModelCard.of_adapter` does.
    """
    salt = bytes.fromhex(request.cache_salt) if request.cache_salt else b""
    if request.lora_request is None:
        return salt
    name = request.lora_request.lora_name.encode()
    marker = b"|adapter=%d:%s" % (len(name), name)
    return salt if marker in salt else salt + marker
