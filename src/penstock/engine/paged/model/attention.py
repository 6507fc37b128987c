"""The attention function that transformers' models call; it forwards to an `AttentionStep`.

The model is called with `paged_step=...`, a keyword that its layers pass down to the attention function. The state of a
step travels with the call, so several engines can share a process.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "penstock_paged"
"""Name of the attention implementation. It has no mask function, so transformers builds no masks for it."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Parameters of one layer's attention."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None


class AttentionStep(Protocol):
    """Computes the attention of one forward pass."""

    def attend(
        self,
        call: LayerCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Compute the attention of one layer.

        Args:
            call: layer and parameters.
            query: (1, heads, tokens, head_dim), rotated.
            key: (1, kv_heads, tokens, head_dim), rotated.
            value: as `key`, not rotated.
            extra: further keywords that the model passed.

        Returns:
            (1, tokens, heads, head_dim)
        """
        ...


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_step: AttentionStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = LayerCall(module.layer_idx, scale, sliding_window, softcap)
    if attention_mask is not None:
        extra["attention_mask"] = attention_mask
    return paged_step.attend(call, query, key, value, extra), None


AttentionInterface.register(ATTENTION, _attention_function)


def dense_attention(
    call: LayerCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend (n, heads, queries, head_dim) to (n, kv_heads, keys, head_dim); `mask` is True for keys to attend to."""
    shared = query.shape[1] != keys.shape[1]
    if call.softcap is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=call.scale, enable_gqa=shared
        )
    if shared:
        times = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (call.scale / call.softcap)) * call.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores.float(), -1).to(query.dtype) @ values
