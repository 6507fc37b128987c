"""Which model `penstock chat` asks, and what it says where there is none."""

import json

import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.deploy.commands.watching import chat


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch):
    def answer(*models: str) -> None:
        body = json.dumps({"data": [{"id": model} for model in models]}).encode()
        monkeypatch.setattr(chat, "ask", lambda base, path: body)

    return answer


def test_the_first_model_is_asked_unless_one_is_named(serve) -> None:
    serve("one", "two")
    assert chat._chosen("http://host:1", None) == "one"
    assert chat._chosen("http://host:1", "two") == "two"
    with pytest.raises(RequestError, match="model 'three': the server has one, two"):
        chat._chosen("http://host:1", "three")


@pytest.mark.parametrize("wanted", [None, "one"])
def test_a_server_whose_workers_are_all_away_is_said_to_be_so(serve, wanted: str | None) -> None:
    serve()
    with pytest.raises(Unavailable, match="http://host:1: no worker there serves a model now"):
        chat._chosen("http://host:1", wanted)
