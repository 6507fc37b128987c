"""Rotary embeddings that depend on a length, held to that of the served context.

Some models (longrope, dynamic NTK) rotate keys by factors that transformers takes from the longest row of the call. Rows of
other requests are in the same call here, and cached keys are there for the next one: one length has to hold for all of them.
"""

from typing import Any

import torch

_LENGTHWISE = ("longrope", "dynamic")
"""What the names of such kinds contain."""


def pin_rotary(model: torch.nn.Module, context_length: int) -> None:
    """Have a model's rotary embeddings take every call for one that reaches the end of the context."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(kind in name for name in names if isinstance(name, str) for kind in _LENGTHWISE):
            module.forward = _Pinned(module.forward, context_length - 1)


class _Pinned:
    """A rotary embedding's forward pass with one position more, the last one of the context."""

    def __init__(self, forward: Any, last_position: int) -> None:
        self._forward = forward
        self._last_position = last_position

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self._last_position)
        rotations = self._forward(x, torch.cat((position_ids, last), -1), **options)
        return tuple(rotation[..., :-1, :] for rotation in rotations)
