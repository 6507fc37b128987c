"""Transformers' own model classes, run over paged KV."""

from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.engine.paged.memory import KvShape
from penstock.engine.paged.model.attention import AttentionStep, LayerCall

_CLOSE = 1e-2
"""Difference of logits by the rounding of short floats; a scale that is not known here changes them more."""


class PagedModel:
    """A causal language model whose attention is computed by an `AttentionStep`. One thread uses it."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.name = name
        self._module = module
        self.config = module.config.get_text_config()
        self.device = module.device
        self._last_hidden: torch.Tensor | None = None
        self._head = module.get_output_embeddings()
        self._rows: int | None = None
        """Rows that the next call of the head computes logits of; None: all."""
        if self._head is not None:
            self._head.register_forward_pre_hook(self._keep_hidden)
        probe, logits = self._probe()
        with torch.inference_mode():
            self.has_scores = bool(self.embedding_size) and torch.allclose(
                self.scores(0, 1), logits, rtol=_CLOSE, atol=_CLOSE
            )
        """Whether `scores` gives what `logits` does: of some models it does more with them than is known here."""
        self.kv_shape = probe.shape()
        self.num_heads = probe.num_heads
        self.layer_windows = tuple(probe.windows[layer] for layer in range(self.kv_shape.num_layers))
        """By layer: tokens that it attends to, itself included; None: all before it."""

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def embedding_size(self) -> int:
        """Values of a hidden state; 0 where the model does not show them."""
        return 0 if self._last_hidden is None else self._last_hidden.shape[-1]

    @property
    def last_hidden(self) -> torch.Tensor:
        """(rows, size) hidden states, after the last norm, of the rows of the latest `logits`."""
        assert self._last_hidden is not None, "asked for without embedding_size"
        return self._last_hidden[0]

    def _keep_hidden(
        self, _module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        self._last_hidden = arguments[0]
        return arguments if self._rows is None else (arguments[0][:, : self._rows], *arguments[1:])

    def scores(self, start: int, end: int) -> torch.Tensor:
        """Compute the logits of rows [start, end) of `last_hidden`: (end - start, vocabulary)."""
        assert self._head is not None, "asked for without has_scores"
        scores: torch.Tensor = self._head.forward(self.last_hidden[start:end])
        cap = getattr(self.config, "final_logit_softcapping", None)
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        last_tokens: torch.Tensor,
        step: AttentionStep,
        rows: int | None = None,
    ) -> torch.Tensor:
        """Run the model.

        Args:
            token_ids: (tokens,) tokens of all sequences, one sequence after another.
            positions: (tokens,) position of each token in its sequence.
            last_tokens: indices of the tokens whose logits to compute.
            step: computes the attention.
            rows: compute logits of so many of `last_tokens` alone, and leave the others to `scores`; None: of all.

        Returns:
            (rows, vocabulary)
        """
        self._rows = rows
        output = self._module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=last_tokens,
            paged_step=step,
        )
        return output.logits[0]

    def _probe(self) -> "tuple[_Probe, torch.Tensor]":
        """Run one token to find out which attention the model really uses; its config may not say. Gives its logits too."""
        probe = _Probe(self.name, int(self.config.num_hidden_layers))
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            try:
                logits = self.logits(zero, zero, zero, probe)
            except ConfigError:
                raise
            except Exception as error:
                reason = f"a trial run of {type(self._module).__name__} failed: {one_line(error)}"
                raise unsupported(self.name, reason) from error
        return probe, logits


@dataclass(slots=True)
class _Probe:
    """Checks every attention call of a forward pass and returns zeros."""

    name: str
    num_layers: int
    seen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    num_heads: int = 0
    """Query heads in the layer with the most."""

    def attend(
        self,
        call: LayerCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        strange = [
            name for name in ("attention_mask", "s_aux", "position_bias") if extra.get(name) is not None
        ]
        if strange:
            raise unsupported(self.name, f"its attention needs {strange[0]}")
        if query.shape[-1] != key.shape[-1] or key.shape != value.shape or query.shape[1] % key.shape[1]:
            raise unsupported(
                self.name,
                "queries, keys and values differ in head size or do not divide:"
                f" {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}",
            )
        self.seen[call.layer] = tuple(key.shape)
        self.windows[call.layer] = call.window
        self.dtype = key.dtype
        self.num_heads = max(self.num_heads, query.shape[1])
        return torch.zeros_like(query.transpose(1, 2))

    def shape(self) -> KvShape:
        if sorted(self.seen) != list(range(self.num_layers)) or self.dtype is None:
            raise unsupported(
                self.name,
                f"{len(self.seen)} of its {self.num_layers} layers keep keys and values of their own",
            )
        shapes = set(self.seen.values())
        if len(shapes) > 1:
            raise unsupported(self.name, f"its layers' keys differ in shape: {sorted(shapes)}")
        _, kv_heads, _, head_dim = shapes.pop()
        return KvShape(self.num_layers, kv_heads, head_dim, self.dtype)


def unsupported(name: str, reason: str) -> ConfigError:
    """Make the error for a model that the paged engine cannot run."""
    return ConfigError(
        f"model: {name}: the paged engine cannot run it: {reason};"
        " it runs decoders whose layers all keep keys and values, such as Llama, Qwen, Mistral and Gemma"
    )


def one_line(error: BaseException) -> str:
    """Shorten a library's error text to one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__
