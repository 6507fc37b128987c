"""Reads a model's shape from a Hugging Face `config.json`.

Unknown values are errors, never guesses: a wrong shape makes every estimate wrong.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.perf.hardware import Dtype
from penstock.perf.model_shape import Mla, ModelShape, Moe

_DATA = files("penstock.perf") / "data"
_SIZE_MAX = 1_000_000_000
_LAYERS_MAX = 10_000
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""By model type: every n-th layer has full attention if config.json has no `layer_types`."""
_SHARED_UNSAID = {"llama4", "llama4_text"}
"""Model types with a shared expert that config.json does not state."""
_QUANTIZED = {"mxfp4": Dtype.MXFP4, "nvfp4": Dtype.NVFP4, "fp8": Dtype.FP8, "int8": Dtype.INT8}
_COMPRESSED = {("float", 8): Dtype.FP8, ("int", 8): Dtype.INT8}
"""By (type, bits) of the weights in compressed-tensors' config."""


def load_shape(path: Path) -> ModelShape:
    """Read `config.json` or a directory that holds one.

    Raises:
        ConfigError: the file is missing, not JSON, or not of a supported decoder.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such file; expected a model directory with config.json") from error
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {error.strerror}; expected a model's config.json"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); a config.json is JSON") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: line {error.lineno}: not JSON ({error.msg})") from error
    name = config.get("_name_or_path") if isinstance(config, dict) else None
    return shape_of(config, name=str(name or path.name), source=str(file))


def shape_of(config: Mapping[str, Any], *, name: str, source: str = "config.json") -> ModelShape:
    """Make a shape from a parsed `config.json`.

    Raises:
        ConfigError: a required field is missing, or a value is invalid.
    """
    whole = _Fields(config, source)
    text = whole.part("text_config") or whole
    hidden, heads = text.need("hidden_size"), text.need("num_attention_heads")
    weight_dtype, expert_dtype = _dtypes(whole, text)
    return ModelShape(
        name=name,
        hidden=hidden,
        # Llama 4 keeps its experts' size here, and its dense layers' in another field.
        intermediate=text.get("intermediate_size_mlp", text.need("intermediate_size"), least=1),
        heads=heads,
        kv_heads=text.get("num_key_value_heads", heads, least=1),
        head_dim=text.get("head_dim", max(hidden // heads, 1), least=1),
        vocab=text.need("vocab_size"),
        context_length=text.get("max_position_embeddings", 4096),
        windows=_windows(text),
        tied_embeddings=bool(text.values.get("tie_word_embeddings", config.get("tie_word_embeddings"))),
        mla=_mla(text) if text.get("kv_lora_rank", 0) else None,
        moe=_moe(text),
        weight_dtype=weight_dtype,
        expert_dtype=expert_dtype,
    )


class _Fields:
    """A mapping of the file; each field is checked when read."""

    def __init__(self, values: object, source: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: must be a mapping, got {str(values)[:40]!r}")
        self.values: Mapping[str, Any] = values
        self.source = source

    def part(self, key: str) -> "_Fields | None":
        """Get the mapping under `key`, None if missing."""
        value = self.values.get(key)
        return None if value is None else _Fields(value, f"{self.source}: {key}")

    def get(self, key: str, default: int, *, least: int = 0, most: int = _SIZE_MAX) -> int:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(
                f"{self.source}: {key}: must be a whole number from {least} to {most:,}, got {str(value)[:40]}"
            )
        return value

    def need(self, key: str, *, most: int = _SIZE_MAX) -> int:
        if self.values.get(key) is None:
            raise ConfigError(f"{self.source}: {key}: missing; a decoder's config.json states it")
        return self.get(key, 0, least=1, most=most)

    def get_list(self, key: str) -> list[Any] | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{self.source}: {key}: must be a list, got {str(value)[:40]!r}")
        return value

    @property
    def layers(self) -> int:
        return self.need("num_hidden_layers", most=_LAYERS_MAX)


def _windows(text: _Fields) -> tuple[int | None, ...]:
    layers = text.layers
    window = text.get("sliding_window", 0) or None
    if text.values.get("use_sliding_window") is False:
        window = None
    kinds = text.get_list("layer_types")
    if kinds:
        return _windows_by_kind(text, kinds, window)
    if window is None:
        return (None,) * layers
    every = text.get("sliding_window_pattern", 0) or _FULL_EVERY.get(str(text.values.get("model_type")), 0)
    if every:
        return tuple(None if (index + 1) % every == 0 else window for index in range(layers))
    # Qwen 2: layers from `max_window_layers` on have it, if it is used at all.
    full = text.get("max_window_layers", 0) if text.values.get("use_sliding_window") else 0
    return tuple(None if index < full else window for index in range(layers))


def _windows_by_kind(text: _Fields, kinds: list[Any], window: int | None) -> tuple[int | None, ...]:
    if len(kinds) != text.layers:
        raise ConfigError(
            f"{text.source}: layer_types: has {len(kinds)} entries for {text.layers} layers (num_hidden_layers)"
        )
    windows = {
        "full_attention": None,
        "sliding_attention": window,
        "chunked_attention": text.get("attention_chunk_size", 0) or None,
    }
    unknown = next((kind for kind in kinds if kind not in windows), None)
    if unknown is not None:
        raise ConfigError(
            f"{text.source}: layer_types: {str(unknown)[:40]!r} has no price; known: {', '.join(windows)}"
        )
    return tuple(windows[kind] for kind in kinds)


def _mla(text: _Fields) -> Mla:
    return Mla(
        kv_lora_rank=text.need("kv_lora_rank"),
        rope_head_dim=text.need("qk_rope_head_dim"),
        nope_head_dim=text.need("qk_nope_head_dim"),
        v_head_dim=text.need("v_head_dim"),
        q_lora_rank=text.get("q_lora_rank", 0) or None,
    )


def _moe(text: _Fields) -> Moe | None:
    keys = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((number for key in keys if (number := text.get(key, 0))), 0)
    if experts <= 1:
        return None
    intermediate = text.get("moe_intermediate_size", text.need("intermediate_size"), least=1)
    shared = int(str(text.values.get("model_type")) in _SHARED_UNSAID)
    shared = text.get("n_shared_experts", shared) * intermediate
    groups, reached = text.get("n_group", 0), text.get("topk_group", 0)
    return Moe(
        num_experts=experts,
        experts_per_token=text.get("num_experts_per_tok", text.need("num_experts_per_tok"), most=experts),
        intermediate=intermediate,
        shared_intermediate=text.get("shared_expert_intermediate_size", 0) or shared,
        dense_layers=text.layers - _num_expert_layers(text),
        expert_groups_per_token=reached if reached and groups != reached else None,
    )


def _num_expert_layers(text: _Fields) -> int:
    """Count the layers with experts: all, all from one on, every n-th, or those not listed as dense."""
    first = text.get("first_k_dense_replace", 0)
    dense = text.get_list("mlp_only_layers") or []
    every = max(text.get(key, 1, least=1) for key in ("decoder_sparse_step", "interleave_moe_layer_step"))
    # DeepSeek counts layers from 0, the others from 1.
    from_0 = text.get("moe_layer_freq", 1, least=1)
    return sum(
        index >= first and index not in dense and (index + 1) % every == 0 and index % from_0 == 0
        for index in range(text.layers)
    )


def _dtypes(whole: _Fields, text: _Fields) -> tuple[Dtype, Dtype]:
    """Give the formats of (weights, routed experts)."""
    stated = next(
        (said for of in (text, whole) for key in ("dtype", "torch_dtype") if (said := of.values.get(key))),
        "bfloat16",
    )
    wide = {"float32": Dtype.FP32, "float16": Dtype.FP16}.get(str(stated).removeprefix("torch."), Dtype.BF16)
    quantization = whole.part("quantization_config") or text.part("quantization_config")
    if quantization is None or not quantization.values:
        return wide, wide
    dtype = _quantized(quantization)
    return (wide if dtype is Dtype.MXFP4 else dtype), dtype  # MXFP4 checkpoints use it in experts only


def _quantized(quantization: _Fields) -> Dtype:
    said = [
        str(quantization.values.get(key) or "").lower() for key in ("quant_algo", "quant_method", "format")
    ]
    found = next((dtype for word, dtype in _QUANTIZED.items() if any(word in part for part in said)), None)
    groups = quantization.part("config_groups")
    if found is None and groups is not None:
        weights = [
            of for name in groups.values if (group := groups.part(name)) and (of := group.part("weights"))
        ]
        kinds = {_COMPRESSED.get((str(of.values.get("type")), of.get("num_bits", 0))) for of in weights}
        found = kinds.pop() if len(kinds) == 1 else None
    if found is None:
        raise ConfigError(
            f"{quantization.source}: {next(filter(None, said), '')!r} is no format with a price; known: "
            f"{', '.join(sorted(_QUANTIZED))}; or leave it out of the file and set weight_dtype"
        )
    return found


def known_shapes() -> list[str]:
    """List the names of the shapes in the package."""
    return sorted(
        entry.name.removesuffix(".json") for entry in _DATA.iterdir() if entry.name.endswith(".json")
    )


def find_shape(model: str, *, beside: Path | None = None) -> ModelShape:
    """Load a model's shape by known name, or from a directory or file with its `config.json`.

    Args:
        model: the graph's `model`.
        beside: second base of relative paths, such as the graph's directory.

    Raises:
        ConfigError: neither; suggests the nearest known name.
    """
    if model in known_shapes():
        text = (_DATA / f"{model}.json").read_text(encoding="utf-8")
        return shape_of(json.loads(text), name=model, source=f"{model}.json")
    for path in (Path(model).expanduser(), (beside or Path()) / model):
        if path.exists():
            return load_shape(path)
    raise ConfigError(
        f"model {model}: its shape is not known{nearest(model, known_shapes())}; or give a directory with a config.json"
    )
