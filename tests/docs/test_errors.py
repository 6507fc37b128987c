"""The page of errors has every code of the API, every event that asks somebody to act, and messages as they are in the code."""

import ast
import importlib
import re
import runpy
from pathlib import Path

import pytest

import penstock
from penstock.core.errors import PenstockError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
ANSWERS, COMMANDS, LOG = re.split(r"(?m)^## .*$", PAGE)[1:]
SOURCES = "\n".join(path.read_text() for path in sorted(Path(penstock.__path__[0]).rglob("*.py")))


def rows(section):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"(?m)^\| `.*$", section)
    ]


def kinds(of=PenstockError):
    importlib.import_module("penstock.frontend.errors")
    yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


def test_every_code_of_an_answer_is_listed_with_its_status():
    listed = {code: cells[1] for cells in rows(ANSWERS) for code in re.findall(r"`(\w+)`", cells[0])}
    known = {}
    for kind in kinds():
        if kind.__module__.startswith("penstock.") and kind.code != "invalid_request_error":
            known[kind.code] = str(getattr(kind, "status", kind.http_status))
    assert listed.keys() == known.keys()
    for code, status in known.items():
        assert status in listed[code], code


@pytest.mark.parametrize("cells", rows(COMMANDS), ids=lambda cells: cells[0])
def test_each_message_of_a_command_is_in_the_code(cells):
    said = cells[0].strip("`")
    assert said in re.sub(r'"\s*\n\s*f?"', "", SOURCES), said
    assert len(cells[1]) > 3


def test_every_event_that_asks_somebody_to_act_is_listed():
    listed = {event for cells in rows(LOG) for event in re.findall(r"`(\w+)`", cells[0])}
    assert listed == set(re.findall(r'_log\.error\(\s*"(\w+)"', SOURCES))


REFERENCE = runpy.run_path(str(ROOT / "tools" / "errors_reference.py"))


def test_the_page_of_every_message_has_each_area_and_message():
    page = REFERENCE["page"]()
    assert re.findall(r"(?m)^## (.*)$", page) == list(REFERENCE["AREAS"])
    assert len(re.findall(r"(?m)^\| ", page)) == len(REFERENCE["messages"]()) + len(REFERENCE["AREAS"])


def test_every_message_in_the_code_is_listed_with_its_fix():
    found = REFERENCE["messages"]()
    assert len(found) > 1100
    assert [
        said.text for said in found if said.cells[1].removeprefix(f"`{said.code}`:").strip() == ""
    ] == [], "say in the message what to do, after '; ', or add a line to FIXES of tools/errors_reference.py"


def test_no_fix_is_left_of_a_message_that_is_gone():
    texts = [said.text for said in REFERENCE["messages"]() if "; " not in said.text and not said.code]
    fixes = REFERENCE["FIXES"]
    used = {next((words for words in fixes if re.search(words, text)), None) for text in texts}
    assert [words for words in fixes if words not in used] == []


@pytest.mark.parametrize(
    ("expression", "texts"),
    [
        ('f"{path}: {self.name!r} is wrong; mend it"', ["PATH: 'NAME' is wrong; mend it"]),
        ('"a" if x else f"b {len(y)}"', ["a", "b …"]),
        ('f"no {what}" + hint(x)', ["no WHAT…"]),
        ('"is there " + ("one" if x else "none")', ["is there one", "is there none"]),
        ("str(error)", []),
    ],
)
def test_a_message_is_read_from_its_expression(expression, texts):
    assert list(REFERENCE["_texts"](ast.parse(expression, mode="eval").body)) == texts
