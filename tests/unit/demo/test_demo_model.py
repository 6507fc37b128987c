"""The packaged demo checkpoint is complete and small, and its held-out questions are held out."""

import importlib.util
import json
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from penstock.demo import MODEL_DIR

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = ROOT / "tests" / "data" / "demo_questions.json"


def settings(name: str) -> dict:
    return json.loads((MODEL_DIR / name).read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def corpus_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_corpus", ROOT / "tools" / "demo_model" / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def render(messages: list[dict], *, add_generation_prompt: bool) -> str:
    template = ImmutableSandboxedEnvironment().from_string(settings("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_the_checkpoint_is_complete():
    present = {path.name for path in MODEL_DIR.iterdir()}
    assert present == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "This is a demo" in (MODEL_DIR / "README.md").read_text()


def test_config_tokenizer_and_weights_agree(tokenizer):
    config = settings("config.json")
    end = tokenizer.token_to_id(settings("tokenizer_config.json")["eos_token"])
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 4096
    assert config["eos_token_id"] == settings("generation_config.json")["eos_token_id"] == end
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    with (MODEL_DIR / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert "lm_head.weight" not in header, "the embeddings are tied"


@pytest.mark.parametrize("text", ["Hello!", "Größe, naïve, 中文, 🙂", "  two  spaces\n\tand a tab", ""])
def test_the_tokenizer_gives_back_every_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_the_chat_template_renders_all_roles(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    text = render(messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(messages, add_generation_prompt=False) == text.removesuffix("<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids.count(tokenizer.token_to_id("<|im_start|>")) == 5
    assert ids.count(tokenizer.token_to_id("<|im_end|>")) == 4


@pytest.mark.slow
def test_no_held_out_question_is_in_the_training_text(corpus_module):
    held_out = [corpus_module.normalise(question) for question in corpus_module.heldout_questions(QUESTIONS)]
    corpus = corpus_module.Corpus(7, {"PARAMS": "2.5", "MEGABYTES": "5"})
    for chat in corpus.conversations(4000):
        for message in chat:
            text = corpus_module.normalise(message["content"])
            assert not any(question in text for question in held_out)


def test_every_fact_can_be_asked_for_and_has_its_key_phrase(corpus_module):
    facts = corpus_module.Corpus(5, {"PARAMS": "2.5", "MEGABYTES": "5"})
    assert len(facts.facts) > 100
    for fact in facts.facts.values():
        assert all(facts.question(fact) for _ in range(20))
        assert all(fact.key in answer and "{PARAMS}" not in answer for answer in fact.answers)
