"""What `penstock serve` names to try once it is ready."""

import json
import shlex
from pathlib import Path

import pytest

from penstock.cli.serve import TryCommands

URL = "http://127.0.0.1:9"


def test_it_names_the_page_and_the_commands_with_the_url_they_need():
    usual = TryCommands("http://127.0.0.1:8000", "m")
    assert usual.commands() == "http://127.0.0.1:8000/ in a browser, penstock chat, penstock top"
    assert (
        TryCommands(URL, "m", has_page=False).commands()
        == f"penstock chat --url {URL}, penstock top --url {URL}"
    )
    secure = TryCommands("https://127.0.0.1:9", "m", certificate=Path("/a b/c.pem"), has_page=False)
    assert secure.commands().startswith("penstock chat --url https://127.0.0.1:9")


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({}, []),
        ({"asks_key": True}, ["Authorization: Bearer KEY"]),
        ({"asks_key": True, "has_key": True}, ["Authorization: Bearer $PENSTOCK_API_KEY"]),
    ],
)
def test_a_curl_line_is_one_command_whatever_the_model_is_called(fields, headers):
    model = 'it\'s a "model" $(id) `id`'
    words = shlex.split(TryCommands(URL, model, **fields).curl())
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    assert [words[at + 1] for at, word in enumerate(words) if word == "-H"][1:] == headers
    assert json.loads(words[words.index("-d") + 1])["model"] == model


@pytest.mark.parametrize("fields", [{}, {"asks_key": True}, {"asks_key": True, "has_key": True}])
def test_the_program_for_python_can_be_pasted(fields):
    text = TryCommands(URL, "m", **fields).more()
    code = [line[2:] for line in text.splitlines() if line.startswith("  ") and not line.startswith("  curl")]
    compile("\n".join(code), "next", "exec")
    assert ('os.environ["PENSTOCK_API_KEY"]' in text) is bool(fields.get("has_key"))
