"""What a checkpoint's files say, without PyTorch."""

import json
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.paged.checkpoint import Checkpoint
from tests.support.tokenizer import END, tiny_tokenizer_json

CONFIG = {"model_type": "llama", "max_position_embeddings": 4096, "eos_token_id": 3}


def write(
    path: Path, config: object = CONFIG, generation: object = None, weights: bytes = b"12345678"
) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_what_the_files_say(tmp_path):
    generation = {"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20, "top_p": None, "max_length": 100}
    checkpoint = Checkpoint.open(str(write(tmp_path / "a", generation=generation)))
    assert checkpoint.context_length == 4096
    assert checkpoint.eos_token_ids == (7, 8, 3)
    assert checkpoint.default_sampling == (("temperature", 0.6), ("top_k", 20.0))
    assert [file.name for file in checkpoint.weight_files()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "eos"),
    [
        ({}, None, {}, ()),
        ({"eos_token_id": 3}, None, {}, (3,)),
        ({"eos_token_id": 3}, {"eos_token_id": 4}, {}, (4, 3)),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": [1, 2]}}, {}, {}, (1, 2, 3)),
        ({}, None, {"tokenizer_config": END}, (0,)),
        ({}, None, {"special_tokens_map": {"content": END}}, (0,)),
        ({}, {"eos_token_id": 4}, {"tokenizer_config": {"content": END}}, (4, 0)),
        ({}, {"eos_token_id": [4, 0]}, {"tokenizer_config": END}, (4, 0)),
        ({}, {"eos_token_id": 4}, {"tokenizer_config": "<|unknown|>", "special_tokens_map": None}, (4,)),
    ],
)
def test_end_of_sequence_tokens_are_those_of_all_files(tmp_path, config, generation, tokenizer, eos):
    write(tmp_path, config, generation)
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizer_json())
    for name, token in tokenizer.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token": token}))
    assert Checkpoint.open(str(tmp_path)).eos_token_ids == eos


def test_a_model_that_says_greedy_is_greedy_by_default(tmp_path):
    checkpoint = Checkpoint.open(str(write(tmp_path, generation={"do_sample": False, "temperature": 0.7})))
    assert checkpoint.default_sampling == (("temperature", 0.0),)


@pytest.mark.parametrize(
    ("said", "is_sound"),
    [
        ({"top_p": 0}, True), ({"top_k": 0}, True), ({"top_p": 1.5}, False), ({"temperature": -1}, False),
        ({"repetition_penalty": 0}, False), ({"min_p": 2}, False),
    ],
)  # fmt: skip
def test_settings_that_no_engine_takes_are_refused_at_the_start(tmp_path, said, is_sound):
    checkpoint = Checkpoint.open(str(write(tmp_path, generation=said)))
    ((name, value),) = said.items()
    if is_sound:
        assert dict(checkpoint.default_sampling) == {name: value}
    else:
        with pytest.raises(ConfigError, match=rf"generation_config.json: {name}: must be >= .* got {value}"):
            _ = checkpoint.default_sampling


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_no_file_of_a_model(tmp_path, name):
    write(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3554214752\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ConfigError, match=f"pointers of Git LFS .* such as {name}; run git lfs pull"):
        Checkpoint.open(str(tmp_path))


def test_sharded_weights(tmp_path):
    write(tmp_path)
    index = {
        "weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"1")
    checkpoint = Checkpoint.open(str(tmp_path))
    with pytest.raises(ConfigError, match=r"1 of 2 weight files are missing, such as model-2\.safetensors"):
        checkpoint.weight_files()
    (tmp_path / "model-2.safetensors").write_bytes(b"2")
    assert [file.name for file in checkpoint.weight_files()] == ["model-1.safetensors", "model-2.safetensors"]


def test_a_revision_names_content(tmp_path):
    first = Checkpoint.open(str(write(tmp_path / "a"))).revision()
    assert len(first) == 16
    assert Checkpoint.open(str(write(tmp_path / "b"))).revision() == first
    others = [
        write(tmp_path / "c", weights=b"12345679"),
        write(tmp_path / "d", weights=b"123456780"),
        write(tmp_path / "e", config=CONFIG | {"rope_theta": 1}),
    ]
    assert len({first} | {Checkpoint.open(str(path)).revision() for path in others}) == 4


def read_all(path: Path) -> None:
    checkpoint = Checkpoint.open(str(path))
    checkpoint.weight_files()
    assert checkpoint.context_length


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "no config.json; expected a directory"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: line 1: not JSON"),
        (
            lambda path: (path / "config.json").write_text("[]"),
            "config.json: must be a JSON object, got list",
        ),
        (lambda path: (path / "config.json").write_bytes(b"\xff\xfe"), "config.json: not JSON"),
        (lambda path: (path / "model.safetensors").unlink(), "no weights, expected"),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            r"pytorch_model\.bin is a pickle, save it as safetensors",
        ),
        (lambda path: (path / "config.json").write_text("{}"), "max_position_embeddings: must be a number"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path, spoil, message):
    spoil(write(tmp_path))
    with pytest.raises(ConfigError, match=message) as raised:
        read_all(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("model", ["/no/such/dir", "./missing", "a/b/c"])
def test_no_such_directory(model):
    with pytest.raises(ConfigError, match=f"no such directory: {model}"):
        Checkpoint.open(model)


def test_the_hub_out_of_reach_is_one_line(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match="is no directory here, and the Hugging Face hub did not give it"
    ) as raised:
        Checkpoint.open("nobody/nothing")
    assert "\n" not in str(raised.value)
