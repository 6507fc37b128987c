"""A small random vision-language checkpoint, Idefics3 in miniature, for tests of engines that read images."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer

from tests.support.checkpoints import EOS_TOKEN_ID, name_all_tokens
from tests.support.tokenizer import END, tiny_tokenizer_json

IMAGE_TOKEN = "<image>"
TILE, PATCH, SCALE = 56, 7, 2
"""An image becomes tiles of 56 x 56 pixels, each of (56 / 7 / 2)² = 16 tokens, besides marks between them."""
_MARKS = ("<fake_token_around_image>", IMAGE_TOKEN, "<end_of_utterance>", "<global-img>")
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for content in message.content %}"
    "{% if content.type == 'image' %}<image>{% else %}{{ content.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VOCAB = 512
_SPREAD = 1.5


def make_vision_checkpoint(path: Path, *, seed: int = 0) -> Path:
    """Write a float32 Idefics3 with random weights, its tokenizer and its image processor's settings; give `path`."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer_json().decode())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*_MARKS, *_ROWS)])
    config = transformers.Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": _VOCAB,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "bos_token_id": 1,
            "eos_token_id": EOS_TOKEN_ID,
            "pad_token_id": EOS_TOKEN_ID,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": PATCH,
        },
        scale_factor=SCALE,
        image_token_id=tokenizer.token_to_id(IMAGE_TOKEN),
        pad_token_id=EOS_TOKEN_ID,
    )
    transformers.utils.logging.disable_progress_bar()
    model = transformers.Idefics3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 1.0 if "embed_tokens" in name else _SPREAD * parameter[0].numel() ** -0.5
                parameter.normal_(0, scale, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
    model.generation_config.update(eos_token_id=EOS_TOKEN_ID, do_sample=False)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    name_all_tokens(path / "tokenizer.json", _VOCAB)
    settings = {"tokenizer_class": "TokenizersBackend", "chat_template": _TEMPLATE, "eos_token": END}
    _write(path / "tokenizer_config.json", settings)
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 2 * TILE},
        "max_image_size": {"longest_edge": TILE},
        "do_image_splitting": True,
    }
    _write(path / "preprocessor_config.json", images | {"processor_class": "Idefics3Processor"})
    tokens = (TILE // PATCH // SCALE) ** 2
    _write(path / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": tokens})
    return path


def _write(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content))
