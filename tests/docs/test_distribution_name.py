"""No text tells anybody to install PyPI's `penstock`, which is another project's: the distribution is `penstock-llm`."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
INSTALLS = re.compile(
    r"""
    \bpenstock\\?\[[a-z]                                             # an extra: penstock[engine]
    | \bpenstock\s*[=~><!]=\s*[\d.]                                  # a version: penstock==0.1
    | \b(?:install|add|download|wheel)\ [^\n\#;&|]*?(?<=[\s'"])penstock(?=['"`,.)\s]|$)
    | (?:\buvx|\bpipx\ run|--with|--from)\ (?:-\S+\ )*['"]?penstock(?=['"`,.)\s]|$)
    """,
    re.VERBOSE,
)


def strangers(text: str) -> list[str]:
    """Every place of a text that would install the other project."""
    return [found.group() for found in INSTALLS.finditer(text)]


@pytest.mark.parametrize(
    "text",
    [
        "pip install penstock", "run `pip install penstock`, or", "pip install 'penstock[engine]'", "penstock[object,nats]",
        r"match='penstock\[otel\]'", "uv add penstock", "uv pip install penstock", "uvx penstock serve --demo", "penstock==0.1.0",
        "pip install -U vllm penstock", "penstock >= 0.1", "pipx run penstock --help",
    ],
)  # fmt: skip
def test_finds(text: str) -> None:
    assert strangers(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'penstock-llm[engine]'", "pip install penstock-llm", "pip install .", "penstock serve --engine vllm",
        "after pip install, penstock serve answers", "penstock_llm-0.1.0.whl", "penstock[@]", "uv run --with penstock-llm penstock",
    ],
)  # fmt: skip
def test_leaves_alone(text: str) -> None:
    assert not strangers(text)


def test_no_text_installs_the_other_project() -> None:
    assert tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["name"] == "penstock-llm"
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    found = {}
    for name in filter(None, names.stdout.split("\0")):
        path = CHECKOUT / name
        if path == Path(__file__) or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if places := strangers(text):
            found[name] = places
    assert not found
