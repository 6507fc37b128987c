"""Loads a checkpoint into transformers' model class, with attention over paged KV, groups of layers and rotary factors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from penstock.core.errors import ConfigError
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.paged.memory import Dtype, KvShape
from penstock.kv.groups import ONE_TABLE, GroupKind, KvGroup, KvGroups, Windows

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
    """Computes the attention of one forward pass.

    The model is called with the step as `paged_step`, a keyword that its layers pass down to the attention function of transformers.
    The state of a step travels with the call, so several engines can share a process.
    """

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
        """Run one token, and give the attention that the model really uses and the token's logits; a config may not name the attention."""
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


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which table and which place in a block each layer has.

    Attributes:
        places: by layer, (number of its group, its place in a block of this group).
        windows: by group, tokens that its layers attend to; None: all.
        layers_per_block: layers that a block has room for. The last group with a window may have fewer.
    """

    places: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...]
    layers_per_block: int

    @classmethod
    def of(cls, windows: Sequence[int | None], context_length: int, *, divide: bool = True) -> "LayerGroups":
        """Divide a model's layers.

        As many layers as are over the whole context make a block, so that all blocks have equal bytes. All layers stay in one
        group if none or all of them have a window, or if a request of `context_length` tokens would then take no less memory.

        Args:
            windows: by layer, tokens that it attends to, itself included; None: all before it.
            context_length: most tokens of a request.
            divide: whether there may be several groups.
        """
        sizes = [None if each is None or each >= context_length else each for each in windows]
        one = cls(tuple((0, layer) for layer in range(len(sizes))), (None,), len(sizes))
        whole = [layer for layer, window in enumerate(sizes) if window is None]
        if not divide or not whole or len(whole) == len(sizes):
            return one
        places = [(0, 0)] * len(sizes)
        groups: list[int | None] = []
        for window in (None, *sorted({each for each in sizes if each is not None}, reverse=True)):
            layers = [layer for layer, size in enumerate(sizes) if size == window]
            for index, layer in enumerate(layers):
                places[layer] = len(groups) + index // len(whole), index % len(whole)
            groups += [window] * -(-len(layers) // len(whole))
        divided = cls(tuple(places), tuple(groups), len(whole))
        held = sum(min(window or context_length, context_length) for window in groups)
        return divided if held * len(whole) < context_length * len(sizes) else one

    def kv_groups(self, block_size: int, token_bytes: int = 0) -> KvGroups | None:
        """Describe the groups to the KV manager, with blocks of `block_size` tokens; None for one group.

        Args:
            block_size: tokens in a block.
            token_bytes: KV of a token in one layer.
        """
        if len(self.windows) == 1:
            return None
        return KvGroups(
            [
                KvGroup(
                    GroupKind.FULL if window is None else GroupKind.SLIDING_WINDOW,
                    tuple(str(layer) for layer, (its, _) in enumerate(self.places) if its == group),
                    token_bytes * self.layers_per_block,
                    window,
                )
                for group, window in enumerate(self.windows)
            ],
            block_size,
        )

    def held_windows(self) -> Windows:
        """Say what windows take beside the blocks of a request's tokens."""
        sizes = [window for window in self.windows if window is not None]
        if not sizes:
            return ONE_TABLE
        return Windows(
            tuple((size, sizes.count(size) * self.layers_per_block) for size in sorted(set(sizes))),
            self.layers_per_block,
        )


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


_LATENT = ("kv_lora_rank", "q_lora_rank")
_SHOWN_BYTES_MIN = 1 << 30
"""Weights of so many bytes show a bar on stderr as they load; fewer take about a second."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read_config(checkpoint: Checkpoint) -> Any:
    """Read config.json as transformers' config object, and refuse unsupported models before loading weights.

    Raises:
        ConfigError: the architecture is not supported, or its sizes make no sense.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:  # configs of different architectures fail with different errors
        raise unsupported(
            checkpoint.name,
            f"transformers {transformers.__version__} does not read its config.json: {one_line(error)}",
        ) from error
    text = config.get_text_config()
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise unsupported(checkpoint.name, f"{config.model_type} is no causal language model")
    latent = [key for key in _LATENT if getattr(text, key, None)]
    if latent:
        raise unsupported(checkpoint.name, f"it compresses keys and values ({latent[0]})")
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise unsupported(checkpoint.name, f"it has layers of type {', '.join(sorted(kinds))}")
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    if not model_class._supports_attention_backend:
        raise unsupported(checkpoint.name, f"{model_class.__name__} has no attention interface")
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        size = getattr(text, key, None)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{checkpoint.path / 'config.json'}: {key}: must be >= 1, got {size!r}")
    if getattr(text, "head_dim", None) is None and text.hidden_size % text.num_attention_heads:
        raise ConfigError(
            f"{checkpoint.path / 'config.json'}: head_dim: missing, and hidden_size {text.hidden_size}"
            f" is no multiple of num_attention_heads {text.num_attention_heads}"
        )
    return config


def load_model(
    checkpoint: Checkpoint, config: Any, dtype: Dtype, device: torch.device, *, context_length: int
) -> PagedModel:
    """Load a model onto a device; large ones show how far they are.

    Args:
        checkpoint: the files.
        config: result of `read_config`.
        dtype: dtype of the weights.
        device: where the model computes.
        context_length: most tokens of a request.

    Raises:
        ConfigError: weights are missing or do not match their config, or a trial run shows an attention variant that the
            engine does not support.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device: {device} is not there: this PyTorch ({torch.__version__}) sees no GPU; use cpu"
        )
    size_bytes = sum(file.stat().st_size for file in checkpoint.weight_files())
    if size_bytes >= _SHOWN_BYTES_MIN:
        transformers.utils.logging.enable_progress_bar()
    else:
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # one error below says the same more briefly
    try:
        module, info = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        module = module.eval().to(device)
    except Exception as error:  # damaged files make libraries raise errors of any kind
        raise ConfigError(f"{checkpoint.path}: the weights cannot be loaded: {one_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"{checkpoint.path}: the weights lack {len(missing)} tensors that config.json asks for,"
            f" such as {missing[0]}; download the checkpoint again"
        )
    if device.type == "cpu":
        _store_by_input(module)
    pin_rotary(module, context_length)
    return PagedModel(module, checkpoint.name)


def _store_by_input(module: torch.nn.Module) -> None:
    """Store float32 matrices in column-major order: MKL multiplies few rows faster with it.

    Measured with torch 2.13 on a core of an AMD EPYC (Zen 4), matrices of 256 x 256 to 4096 x 256: 4 to 32 rows take
    a fifth less time; more rows, and matrices of 2048 x 2048, take the same. bfloat16 and float16 take longer and are left
    alone. So is an embedding that doubles as the output layer, since it is read by rows.
    """
    embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)}
    for layer in module.modules():
        if (
            isinstance(layer, torch.nn.Linear)
            and layer.weight.dtype == torch.float32
            and id(layer.weight) not in embeddings
        ):
            layer.weight.data = layer.weight.data.t().contiguous().t()
