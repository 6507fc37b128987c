import hashlib
import json
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import ModelCard
from penstock.deploy.card import make_card, open_checkpoint
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.graph import Graph, RoleSpec
from tests.support.tokenizer import tiny_model_files

PAGED = RoleSpec(engine="paged")
MOCK = RoleSpec(engine="mock")
TOKENIZER = tiny_model_files()["tokenizer.json"]


def make(directory: Path) -> Path:
    """Write a model directory that is complete as far as a card goes."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 128, "eos_token_id": 2}))
    generation = {"eos_token_id": [2, 7], "temperature": 0.6}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (directory / "tokenizer.json").write_bytes(TOKENIZER)
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_the_card_says_what_a_frontend_needs(tmp_path: Path) -> None:
    graph = Graph(model=str(make(tmp_path / "m")), block_size=8)
    card = make_card(open_checkpoint(graph), graph, PAGED)
    assert (card.name, card.context_length, card.block_size, card.eos_token_ids) == ("m", 128, 8, (2, 7))
    assert dict(card.default_sampling) == {"temperature": 0.6}
    assert [file.name for file in card.files] == ["tokenizer.json", "generation_config.json", "config.json"]
    tokenizer = card.files[0]
    assert (tokenizer.sha256, tokenizer.size_bytes) == (hashlib.sha256(TOKENIZER).hexdigest(), len(TOKENIZER))
    assert len(card.salt) == 16


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("<|{{ m.role }}|>{{ m.reasoning_content }}{{ m.content }}<|end|>", (2, 7, 0)),
        ("<|{{ m.role }}|>{{ m.content }}", (2, 7)),
        ("{% if m.reasoning_content %}{{ m.reasoning_content }}<|end|>{% endif %}{{ m.content }}<|end|>", (2, 7)),
        ("<|user|>{{ m.content }}{% if m.role == 'assistant' %}{{ '<|end|>' if loop.last else '<|tool|>' }}{% endif %}", (2, 7)),
    ],
    ids=["ends turns", "has no end", "ends each message of a turn", "ends the conversation"],
)  # fmt: skip
def test_the_token_that_a_template_ends_turns_with_ends_answers(
    tmp_path: Path, template: str, ends: tuple[int, ...]
) -> None:
    directory = make(tmp_path / "m")
    whole = "{% for m in messages %}" + template + "{% endfor %}"
    (directory / "chat_template.jinja").write_text(whole)
    graph = Graph(model=str(directory))
    card = make_card(open_checkpoint(graph), graph, MOCK)
    assert card.eos_token_ids == ends
    assert engine_spec(graph, MOCK, open_checkpoint(graph), card=card).eos_token_ids == ends


def test_a_chat_template_of_the_graph_goes_before_all_of_the_models(tmp_path: Path) -> None:
    directory = make(tmp_path / "m")
    (directory / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (directory / name).write_text("the model's")
    given = "{{ messages }}"
    plain, own = (
        make_card(open_checkpoint(graph), graph, MOCK)
        for graph in (Graph(model=str(directory)), Graph(model=str(directory), chat_template=given))
    )
    files = [{file.name: file.sha256 for file in card.files} for card in (plain, own)]
    assert "additional_chat_templates/tool_use.jinja" in files[0]
    assert "additional_chat_templates/tool_use.jinja" not in files[1]
    assert files[1]["chat_template.jinja"] == hashlib.sha256(given.encode()).hexdigest()
    assert plain.salt != own.salt


def test_the_salt_follows_contents_and_number_formats_but_not_the_place(tmp_path: Path) -> None:
    def salt(directory: Path, role: RoleSpec) -> bytes:
        graph = Graph(model=str(directory))
        return make_card(open_checkpoint(graph), graph, role).salt

    directory, copy = make(tmp_path / "m"), make(tmp_path / "copy")
    assert salt(directory, PAGED) == salt(copy, PAGED)
    salts = {
        salt(copy, role)
        for role in (PAGED, MOCK, RoleSpec(kv_dtype="float16"), RoleSpec(weight_dtype="float16"))
    }
    (copy / "model.safetensors").write_bytes(b"WEIGHTS")
    salts.add(salt(copy, PAGED))
    (copy / "tokenizer.json").write_bytes(TOKENIZER + b"\n")
    salts.add(salt(copy, PAGED))
    assert len(salts) == 6


def test_the_graph_says_how_long_a_context_is_served_and_what_rotary_factors_that_takes(
    tmp_path: Path,
) -> None:
    directory = make(tmp_path / "m")
    (directory / "config.json").write_text(
        json.dumps(
            {
                "max_position_embeddings": 128,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            }
        )
    )

    def card(context_length: int | None) -> ModelCard:
        graph = Graph(model=str(directory), context_length=context_length)
        return make_card(open_checkpoint(graph), graph, PAGED)

    cards = [card(length) for length in (None, 65, 64, 10)]
    assert [card.context_length for card in cards] == [128, 65, 64, 10]
    long, as_long, short, as_short = (card.salt for card in cards)
    assert (long, short) == (as_long, as_short)
    assert long != short, "keys of one set would be taken for the other's"
    with pytest.raises(ConfigError, match=r"^context_length: must be <= 128, the model's own, got 129$"):
        card(129)


def test_only_an_engine_that_computes_needs_weights(tmp_path: Path) -> None:
    directory = make(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    graph = Graph(model=str(directory))
    assert make_card(open_checkpoint(graph), graph, MOCK).name == "m"
    with pytest.raises(ConfigError, match="no weights"):
        make_card(open_checkpoint(graph), graph, PAGED)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = make(tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json; save the model's tokenizer"):
        open_checkpoint(Graph(model=str(directory)))


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("tokenizer.json", b'{"a": 1}', "tokenizer.json: "),
        ("tokenizer_config.json", b"[1]", "tokenizer_config.json: must be a JSON object, got list"),
        ("chat_template.jinja", b"{% for x in %}", "chat template: line 1: "),
        ("chat_template.jinja", b"caf\xe9", "'utf-8' codec can't decode byte 0xe9"),
        ("generation_config.json", b'{"top_p": NaN}', "top_p: must be a finite number, got nan"),
        ("generation_config.json", b'{"eos_token_id": ["</s>"]}', "eos_token_id: must be a token id or a list"),
    ],
)  # fmt: skip
def test_a_model_that_no_frontend_could_serve_is_refused(
    tmp_path: Path, file: str, content: bytes, text: str
) -> None:
    directory = make(tmp_path / "m")
    (directory / file).write_bytes(content)
    graph = Graph(model=str(directory))
    with pytest.raises(ConfigError) as caught:
        make_card(open_checkpoint(graph), graph, MOCK)
    assert caught.value.message.startswith(str(directory))
    assert text in caught.value.message
    assert "\n" not in caught.value.message
