"""Recipes: their graphs load, every argument is one that the engine documents, and each can be simulated as its page says.

Arguments of vLLM are checked against vLLM itself in tests/vllm.
"""

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.simulated import recipes as bench
from penstock import cli
from penstock.cli.graph import render_workers
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.local_part import runnable_roles
from penstock.graph import Graph, Overrides, load
from penstock.sim.deployment import plan_deployment, simulated_roles
from tests.support.recipes import RECIPES, roles_of

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
PAGE = (ROOT / "docs" / "recipes.md").read_text()
SERVER_ARGS = (DATA / "sglang" / "server_args.txt").read_text().split()
"""Fields of ServerArgs of SGLang 0.5.23."""
LLM_ARGS = json.loads((DATA / "trtllm" / "llm_args.json").read_text())
SIMULATIONS = {
    words[words.index("--graph") + 1]: words
    for words in map(shlex.split, re.findall(r"(?m)^penstock simulate .*$", PAGE.replace("\\\n", " ")))
}


def roles(engine: str) -> list:
    """List (graph, role, spec) of all recipes for an engine."""
    return [each for path in RECIPES for each in roles_of(path) if each[2].engine == engine]


def test_there_are_recipes_for_every_engine_of_others() -> None:
    assert {role.engine for path in RECIPES for _, _, role in roles_of(path)} == {"vllm", "sglang", "trtllm"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_on_its_page_and_serve_takes_it(path: Path) -> None:
    assert f"[{path.stem}](../examples/recipes/{path.name})" in PAGE
    graph = load(path)
    assert graph.name == path.stem
    assert runnable_roles(graph)


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("llama-3.3-70b-fp8-h100-vllm", None),
        ("gpt-oss-120b-h100-p4d4-vllm", None),
        ("deepseek-r1-gb200-sglang", "roles.prefill: worker 1 of 1 would get GPUs 0 to 7, "),
        ("deepseek-r1-gb200-trtllm", "roles.prefill: worker 2 of 4 would get GPUs 4 to 7, "),
    ],
)
def test_graph_check_says_that_a_recipe_spans_machines(
    capsys: pytest.CaptureFixture[str], recipe: str, problem: str | None
) -> None:
    cli.main(["graph", "check", str(ROOT / "examples" / "recipes" / f"{recipe}.yaml")])
    (line,) = (each for each in capsys.readouterr().out.splitlines() if ": penstock serve " in each)
    if problem is None:
        assert line.endswith("penstock serve takes it")
    else:
        assert f"refuses it: {problem}but a machine with gb200 has 4, 0 to 3" in line


def test_graph_check_counts_the_gpus_of_all_roles(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "examples" / "recipes" / "gpt-oss-120b-h100-p4d4-vllm.yaml")
    cli.main(["graph", "check", path, "--set", "roles.decode.replicas=2"])
    assert "roles.decode: worker 2 of 2 would get GPUs 8 to 11, but a machine with h100 has 8" in (
        capsys.readouterr().out
    )
    cli.main(
        ["graph", "check", path, "--set", "roles.decode.replicas=2", "--set", "roles.decode.hardware=l40s"]
    )
    assert "penstock serve takes it" in capsys.readouterr().out, "machines with L40S differ"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_simulated_as_its_page_says(path: Path) -> None:
    words = SIMULATIONS[f"examples/recipes/{path.name}"]
    sets = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
    graph = load(path, Overrides(sets))
    assert simulated_roles(graph)
    assert plan_deployment(graph, beside=path.parent)


def test_the_table_of_simulations_is_of_the_commands_on_the_page() -> None:
    """tests/docs/test_tables.py compares the table with the JSON; this compares the JSON with the page."""
    assert {path.stem for path in RECIPES} == {*bench.RECIPES}
    commands = json.loads((ROOT / "benchmarks" / "results" / "recipes.json").read_text())["config"][
        "commands"
    ]
    for recipe in bench.RECIPES:
        words = ["penstock", "simulate", *bench.arguments(recipe)]
        assert SIMULATIONS[f"examples/recipes/{recipe}.yaml"] == words
        assert shlex.split(commands[recipe]) == words


@pytest.mark.parametrize("each", roles("sglang"), ids=lambda each: f"{each[0].name}-{each[1]}")
def test_sglang_documents_every_argument(each) -> None:
    graph, name, role = each
    server = arguments_of(graph, name)
    assert set(server) <= {*SERVER_ARGS, "stream_output"}, (
        "also those that the adapter sets, one by its older name"
    )
    assert server["tp_size"] == role.devices, "attention-parallel ranks are part of it"
    assert server["ep_size"] == role.expert_parallel
    assert server["nnodes"] * 4 == role.devices, "a tray has four GPUs"
    assert server["context_length"] == graph.context_length


@pytest.mark.parametrize("each", roles("trtllm"), ids=lambda each: f"{each[0].name}-{each[1]}")
def test_tensorrt_llm_documents_every_argument(each) -> None:
    graph, name, role = each
    arguments = arguments_of(graph, name)
    assert set(arguments) <= set(LLM_ARGS["arguments"]), "also those that the adapter sets"
    for section, known in LLM_ARGS["nested"].items():
        assert set(arguments.get(section, {})) <= set(known)
    assert arguments["tensor_parallel_size"] == arguments["moe_expert_parallel_size"] == role.devices


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_rendered_as_recorded(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a deliberate change: penstock graph render examples/recipes/NAME.yaml > tests/data/renders/NAME.yaml."""
    assert cli.main(["graph", "render", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed == (DATA / "renders" / path.name).read_text()
    assert set(yaml.safe_load(printed)) == set(load(path).roles.present())


def test_every_recorded_render_is_of_a_recipe() -> None:
    assert {path.name for path in (DATA / "renders").iterdir()} == {path.name for path in RECIPES}


@pytest.mark.parametrize(
    "path",
    sorted({*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "graphs").glob("*.yaml")}),
    ids=lambda path: path.stem,
)
def test_every_graph_is_rendered_or_refused_in_one_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["graph", "render", "--json", str(path)])
    printed = capsys.readouterr()
    if path.parent.name == "graphs":
        assert (code, printed.err.count("\n")) == (2, 1)
        assert "is a shape for penstock simulate and penstock plan, without weights" in printed.err
        return
    workers = json.loads(printed.out)["workers"]
    assert (code, len(workers)) == (
        0,
        sum(role.replicas for role in load(path).roles.present().values()),
    )


def arguments_of(graph: Graph, name: Role) -> dict[str, Any]:
    """Give the arguments of a role's first worker."""
    return dict(next(each.arguments for each in render_workers(graph, None) if each.role == name))
