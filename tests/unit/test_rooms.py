"""Each folder of the package, and of the experiments, is a room: one idea, and few enough files to look through."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
ROOMS = sorted(
    {path.parent for package in (PACKAGE, ROOT / "benchmarks") for path in package.rglob("*.py")}
    - {ROOT / "benchmarks" / "peers"}
)
FILES_MAX = 12


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_has_one_idea_and_few_files(room: Path) -> None:
    idea = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert idea, f"{room}: its __init__ has to say what it is for"
    files = [path.name for path in room.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= FILES_MAX, (
        f"{room.relative_to(ROOT)}: {len(files)} files, make a room of some of them"
    )


@pytest.mark.parametrize("tests", ["e2e", "properties", "sim"])
def test_folders_of_tests_have_few_files(tests: str) -> None:
    counts = Counter(path.parent for path in (ROOT / "tests" / tests).rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > FILES_MAX} == {}


def test_no_module_has_the_name_of_a_room_beside_it() -> None:
    assert [path for path in PACKAGE.rglob("*.py") if path.with_suffix("").is_dir()] == []
