"""Each folder of the package, and of the experiments, is a room of one idea; modules have no import cycles."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
ROOMS = sorted(
    {path.parent for package in (PACKAGE, ROOT / "benchmarks") for path in package.rglob("*.py")}
    - {ROOT / "benchmarks" / "peers"}
)


def test_every_room_says_what_it_is_for() -> None:
    said = {room: ast.get_docstring(ast.parse((room / "__init__.py").read_text())) for room in ROOMS}
    assert [str(room.relative_to(ROOT)) for room, idea in said.items() if not idea] == []


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
