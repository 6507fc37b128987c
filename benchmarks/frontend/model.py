"""A model without weights that both sides take: a byte-level BPE trained on Python's own modules, and a chat template."""

import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_FILES_MAX = 100
_VOCABULARY = 16_000
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|start|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "head_dim": 64,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def make_model(directory: Path) -> Path:
    """Write the model's files; takes a few seconds."""
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_FILES_MAX]
    tokenizer.train([str(file) for file in files], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    files_of_json = {
        "config.json": _SHAPE | {"vocab_size": tokenizer.get_vocab_size()},
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": [1]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[0],
            "eos_token": _SPECIAL[1],
            "model_max_length": 131_072,
            "chat_template": _TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files_of_json.items():
        (directory / name).write_text(json.dumps(content))
    return directory
