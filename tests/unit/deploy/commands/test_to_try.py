"""What `penstock serve` names to try once it is ready."""

from penstock.deploy.commands.serve import _to_try
from penstock.graph import Graph

GRAPH = Graph(model="demo")


def test_it_names_the_page_and_the_commands_with_the_url_they_need():
    assert _to_try(GRAPH, "http://127.0.0.1:8000") == (
        "http://127.0.0.1:8000/ in a browser, penstock chat, penstock top"
    )
    assert _to_try(GRAPH, "http://127.0.0.1:9") == (
        "http://127.0.0.1:9/ in a browser, penstock chat --url http://127.0.0.1:9, penstock top --url http://127.0.0.1:9"
    )
    without = Graph.model_validate({"model": "demo", "frontend": {"page": {"enabled": False}}})
    assert _to_try(without, "http://127.0.0.1:8000") == "penstock chat, penstock top"
