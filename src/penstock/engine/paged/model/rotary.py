"""Length-dependent rotary embeddings, fixed to the served context length.

Some models (longrope, dynamic NTK) rotate keys by factors that transformers derives from the longest row of a call. Here a
call has rows of several requests, and cached keys are reused by later requests, so all must use one length.
"""

from typing import Any

import torch

_LENGTHWISE = ("longrope", "dynamic")
"""Substrings of such `rope_type` names."""


def pin_rotary(model: torch.nn.Module, context_length: int) -> None:
    """Make a model's rotary embeddings treat every call as one that reaches the end of the context."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(kind in name for name in names if isinstance(name, str) for kind in _LENGTHWISE):
            module.forward = _Pinned(module.forward, context_length - 1)


class _Pinned:
    """A rotary embedding's forward pass with one extra position: the last one of the context."""

    def __init__(self, forward: Any, last_position: int) -> None:
        self._forward = forward
        self._last_position = last_position

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self._last_position)
        rotations = self._forward(x, torch.cat((position_ids, last), -1), **options)
        return tuple(rotation[..., :-1, :] for rotation in rotations)
