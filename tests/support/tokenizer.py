"""A tiny tokenizer and chat template, trained in milliseconds, for tests that need real text."""

import functools
import hashlib
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.core.types.instances import CardFile, ModelCard

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = ("the quick brown fox jumps over the lazy dog, and the dog sleeps on. ", "héllo wörld 你好 🎉 ")


@functools.cache
def tiny_tokenizer_json(vocabulary: int = 400) -> bytes:
    """Train a byte-level BPE: it can encode every text, a character may take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    return tokenizer.to_str().encode()


def tiny_model_files() -> dict[str, bytes]:
    """Return a model's files by name, as a worker publishes them."""
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": END}
    return {"tokenizer.json": tiny_tokenizer_json(), "tokenizer_config.json": json.dumps(config).encode()}


def tiny_card(
    name: str = "tiny",
    files: dict[str, bytes] | None = None,
    *,
    context_length: int = 512,
    block_size: int = 16,
) -> ModelCard:
    """Make a model card with these files (None: `tiny_model_files`)."""
    contents = tiny_model_files() if files is None else files
    return ModelCard(
        name=name,
        context_length=context_length,
        block_size=block_size,
        salt=name.encode(),
        eos_token_ids=(0,),
        files=tuple(
            CardFile(name=file, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
            for file, content in contents.items()
        ),
        created_s=1_700_000_000,
    )
