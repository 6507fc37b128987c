"""Loading a checkpoint's weights into transformers' model class."""

from typing import Any

import torch
import transformers

from penstock.core.errors import ConfigError
from penstock.engine.paged.config import Dtype
from penstock.engine.paged.model.attention import ATTENTION
from penstock.engine.paged.model.checkpoint import Checkpoint
from penstock.engine.paged.model.models import PagedModel, one_line, unsupported
from penstock.engine.paged.model.rotary import pin_rotary

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
