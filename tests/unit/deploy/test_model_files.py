import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.model import LocalModel, find_model, served_name
from penstock.graph import Graph, RoleSpec

PAGED = RoleSpec(engine="paged")
MOCK = RoleSpec(engine="mock")


def make(directory: Path, **files: Any) -> Path:
    """Write a model directory: `config` and `generation_config` as JSON, a tokenizer and one weight file."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"max_position_embeddings": 128, "eos_token_id": 2} | files.get("config", {})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    if "generation" in files:
        (directory / "generation_config.json").write_text(json.dumps(files["generation"]))
    return directory


def test_the_card_says_what_a_frontend_needs(tmp_path: Path) -> None:
    directory = make(
        tmp_path / "m", generation={"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20, "max_length": 9}
    )
    card = LocalModel.read(directory, "m").card(Graph(model=str(directory), block_size=8), PAGED)
    assert (card.name, card.context_length, card.block_size, card.eos_token_ids) == ("m", 128, 8, (2, 7))
    assert dict(card.default_sampling) == {"temperature": 0.6, "top_k": 20.0}
    assert [file.name for file in card.files] == ["tokenizer.json", "generation_config.json", "config.json"]
    tokenizer = card.files[0]
    assert (tokenizer.sha256, tokenizer.size_bytes) == (hashlib.sha256(b"{}").hexdigest(), 2)
    assert len(card.salt) == 16


def test_the_salt_follows_contents_and_number_formats(tmp_path: Path) -> None:
    directory = make(tmp_path / "m")
    copy = make(tmp_path / "copy")
    graph = Graph(model="demo")

    def salt(path: Path, role: RoleSpec) -> bytes:
        return LocalModel.read(path, "m").card(graph, role).salt

    assert salt(directory, PAGED) == salt(copy, PAGED)
    salts = {
        salt(copy, PAGED),
        salt(copy, RoleSpec(kv_dtype="float16")),
        salt(copy, RoleSpec(weight_dtype="float16")),
    }
    (copy / "model.safetensors").write_bytes(b"WEIGHTS")
    salts.add(salt(copy, PAGED))
    (copy / "tokenizer.json").write_text("{ }")
    salts.add(salt(copy, PAGED))
    salts.add(salt(copy, MOCK))
    assert len(salts) == 6


def test_weights_in_the_hubs_cache_are_named_by_their_link(tmp_path: Path) -> None:
    directory = make(tmp_path / "m")
    name = hashlib.sha256(b"weights").hexdigest()
    revision = LocalModel.read(directory, "m").revision(weights=True)
    (tmp_path / name).write_bytes(b"never read")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(tmp_path / name)
    assert LocalModel.read(directory, "m").revision(weights=True) == revision


def test_nested_and_missing_fields(tmp_path: Path) -> None:
    nested = make(
        tmp_path / "n",
        config={
            "max_position_embeddings": None,
            "eos_token_id": None,
            "text_config": {"max_position_embeddings": 64, "eos_token_id": 5},
        },
    )
    model = LocalModel.read(nested, "n")
    assert (model.context_length, model.eos_token_ids, model.default_sampling()) == (64, (5,), ())
    greedy = make(tmp_path / "g", generation={"do_sample": False, "temperature": 0.7})
    assert LocalModel.read(greedy, "g").default_sampling() == (("temperature", 0.0),)
    unknown = make(tmp_path / "u", config={"max_position_embeddings": None, "eos_token_id": None})
    assert LocalModel.read(unknown, "u").eos_token_ids == ()
    with pytest.raises(ConfigError, match="max_position_embeddings: missing"):
        _ = LocalModel.read(unknown, "u").context_length


def test_what_is_missing_or_malformed_is_one_line(tmp_path: Path) -> None:
    directory = make(tmp_path / "m")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ConfigError) as caught:
        LocalModel.read(directory, "m").card(Graph(model="demo"), PAGED)
    assert caught.value.message == (
        f"{directory}: no weights (*.safetensors); pytorch_model.bin is of another kind, convert it;"
        " --engine mock needs none"
    )
    assert LocalModel.read(directory, "m").card(Graph(model="demo"), MOCK).name == "m"
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not a JSON object: "):
        LocalModel.read(directory, "m")
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json; a model directory holds"):
        LocalModel.read(directory, "m")


def test_models_are_found_by_directory_or_refused_in_one_line(tmp_path: Path) -> None:
    directory = make(tmp_path / "m")
    assert find_model(str(directory)) == directory.resolve()
    with pytest.raises(
        ConfigError, match=r"there is no directory .*/absent; give a model directory, a hub name"
    ):
        find_model(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="is a file; give the directory"):
        find_model(str(directory / "config.json"))


def test_the_served_name(tmp_path: Path) -> None:
    directory = make(tmp_path / "my-model")
    assert served_name(Graph(model=str(directory)), directory) == "my-model"
    assert served_name(Graph(model=str(directory), served_name="x"), directory) == "x"
    assert served_name(Graph(model="org/name"), directory) == "org/name"
    assert served_name(Graph(model="demo"), directory) == "penstock-demo"
