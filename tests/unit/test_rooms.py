"""Each folder of the package, and of the experiments, is a room: one idea, few files, small files, no import cycles."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
ROOMS = sorted(
    {path.parent for package in (PACKAGE, ROOT / "benchmarks") for path in package.rglob("*.py")}
    - {ROOT / "benchmarks" / "peers"}
)
FILES_MAX = 12
LINES_MAX = 450


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_has_one_idea_and_few_files(room: Path) -> None:
    idea = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert idea, f"{room}: its __init__ has to say what it is for"
    files = [path.name for path in room.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= FILES_MAX, (
        f"{room.relative_to(ROOT)}: {len(files)} files, make a room of some of them"
    )
    for path in room.glob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= LINES_MAX, (
            f"{path.relative_to(ROOT)}: {lines} lines, give each noun a file of its own"
        )


@pytest.mark.parametrize("tests", ["e2e", "properties", "sim", "unit"])
def test_folders_of_tests_have_few_files(tests: str) -> None:
    counts = Counter(path.parent for path in (ROOT / "tests" / tests).rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > FILES_MAX} == {}


def test_unit_tests_are_in_the_rooms_of_what_they_test() -> None:
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    ours = {folder for folder in folders if folder.parts and folder.parts[0] not in {"benchmarks", "plugins"}}
    assert [str(folder) for folder in sorted(ours) if not (PACKAGE / folder).is_dir()] == []


def test_no_module_has_the_name_of_a_room_beside_it() -> None:
    assert [path for path in PACKAGE.rglob("*.py") if path.with_suffix("").is_dir()] == []


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Give one cycle of a graph, from a node to itself; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_cycle_is_found():
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_no_modules_import_each_other():
    graph = grimp.build_graph("penstock", cache_dir=None)  # with imports inside functions, and for types
    found = cycle({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    assert len(graph.modules) > 300
    assert not found, " -> ".join(found)
