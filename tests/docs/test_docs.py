"""What README and docs show is true: commands parse, code compiles, graphs load, links lead somewhere, tables are current."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from penstock import cli
from penstock.cli.serve import FLAGS
from penstock.graph import Graph
from penstock.sim.workload import WorkloadConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
ROUTES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/health",
    "/live",
    "/metrics",
    "/admin/workers",
    "/workers/one",
    "/workers/two",
    "/route",
    "/feedback",
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", page.read_text())


def commands(page: Path) -> list[list[str]]:
    """Every command of the page's shell blocks, as words."""
    found = []
    for block in blocks(page, "bash"):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # an open quote: the next line belongs to it
                continue
            pending = ""
            if words:
                found.append(words)
        assert not pending, f"{page.name}: {pending}"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_what_the_program_takes(page: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for command in commands(page):
        while re.fullmatch(r"\w+=\S*", command[0]):  # variables before a command
            del command[0]
        if "2>" in command:
            del command[command.index("2>") :]
        match command[0]:
            case "penstock":
                if "--version" not in command:
                    cli.make_parser().parse_args(command[1:])
            case "make":
                assert {word for word in command[1:] if "=" not in word and word[0] != "-"} <= targets
            case "curl":
                (url,) = (word for word in command if word.startswith("http"))
                assert re.sub(r"^https?://[^/]+", "", url) in ROUTES
            case "kubectl":
                files = [command[index + 1] for index, word in enumerate(command) if word == "-f"]
                assert all(name == "-" or (ROOT / name).exists() for name in files), files
            case "sudo" | "pip" | "python" | "." | "export" | "kill" | "git" | "openssl":
                pass
            case other:
                pytest.fail(f"{page.name} shows {other!r}, which no test knows")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_compiles_and_graphs_load(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
    for block in blocks(page, "yaml"):
        data = yaml.safe_load(block)
        if "model" in data:
            Graph.model_validate(data)


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), target


def anchors(page: Path) -> set[str]:
    """Give the names under which a page's headings can be linked to."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    headings = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"(?m)^#+ (.*)$", text)]
    return {heading.strip().replace(" ", "-") for heading in headings}


def test_the_files_of_the_architecture_page_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+(?:\.py|/))`", page)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / "src" / "penstock" / name).exists()] == []


def test_the_fields_of_the_configuration_page_are_current() -> None:
    reference = runpy.run_path(str(ROOT / "tools" / "config_reference.py"))
    page = reference["PAGE"].read_text()
    assert reference["render"](page) == page, "run python tools/config_reference.py"
    definitions = reference["dump_all"](reference["definitions"]())
    assert reference["DEFINITIONS"].read_text() == definitions, "run python tools/config_reference.py"


@pytest.mark.parametrize(
    "block",
    [
        block
        for page in ("transfer", "transfer-reference")
        for block in blocks(ROOT / "docs" / f"{page}.md", "python")
    ],
)
def test_what_the_transfer_pages_show_runs(block: str) -> None:
    exec(compile(block, "transfer.md", "exec"), {"__name__": "transfer_page"})


def test_every_flag_of_serve_is_in_the_configuration_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    flags = [*FLAGS, "--demo", "--graph", "--first-chat", "--log-level", "--set"]
    assert [flag for flag in flags if f"`{flag}" not in page] == []
    for flag, (place, _, _) in FLAGS.items():
        assert re.search(rf"`{flag} .*\| .*`{place}`", page), flag


def test_every_flag_of_simulate_is_in_the_simulation_page() -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    parser = cli.make_parser()._subparsers._group_actions[0].choices["simulate"]
    parser.load()
    flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
    assert {flag for flag in flags if flag not in page} == set()


def test_every_field_of_a_synthetic_workload_is_in_the_simulation_page() -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    assert [name for name in WorkloadConfig.model_fields if f"\n{name}: " not in page] == []
    for path in (ROOT / "examples" / "workloads").glob("*.yaml"):
        assert path.read_text().split("\n", 2)[2] in page
        WorkloadConfig.parse(yaml.safe_load(path.read_text()), source=path.name)


def test_the_commands_in_example_graphs_name_files_that_are_there() -> None:
    for path in (ROOT / "examples" / "graphs").glob("*.yaml"):
        commands = re.findall(r"#   penstock simulate (.*)", path.read_text())
        assert commands, path.name
        for command in commands:
            named = [word for word in command.split() if word.endswith((".yaml", ".json", ".jsonl"))]
            assert [name for name in named if not (ROOT / name).exists()] == [], path.name
