from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Location, Role
from penstock.demo import MODEL_DIR
from penstock.graph import Graph, Overrides, Roles, RoleSpec, build, load
from penstock.graph.engine_prices import engine_prices, make_roofline
from penstock.perf.model_config import load_shape
from penstock.perf.profile import DecodePoint, PrefillPoint, Profile

ROOT = Path(__file__).parents[3] / "examples"
EXAMPLES = [ROOT / "graph.py", *sorted(ROOT.glob("*.yaml")), *sorted((ROOT / "graphs").glob("*.yaml"))]


def write(tmp_path: Path, text: str, name: str = "graph.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, Overrides(overrides))
    return [line.replace(f"{path.parent}/", "") for line in caught.value.message.splitlines()]


def test_a_model_is_all_it_takes() -> None:
    graph = Graph(model="demo")
    assert graph.roles.present() == {Role.AGGREGATED: RoleSpec()}
    assert (graph.frontend.host, graph.frontend.port, graph.block_size) == ("127.0.0.1", 8000, 16)


def test_every_mistake_is_one_line_with_file_path_and_value(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: demo\nfrontend: {port: 70000, proceses: 2}\nroles:\n  decode: {replicas: -1, weight_dtype: fp8}\n",
    )
    assert mistakes(path) == [
        "graph.yaml: frontend.port: must be <= 65535, got 70000",
        "graph.yaml: frontend.proceses: unknown key; did you mean 'processes'?",
        "graph.yaml: roles.decode.replicas: must be >= 0, got -1",
        (
            "graph.yaml: roles.decode.weight_dtype: must be one of 'auto', 'float32', 'bfloat16' or 'float16' with"
            " engine 'paged', got 'fp8'; engine 'mock' takes any, to be simulated"
        ),
    ]


def test_a_key_written_twice_is_a_mistake(tmp_path: Path) -> None:
    path = write(tmp_path, "model: demo\nroles:\n  decode: {}\n  prefill: {}\n  decode: {}\n")
    assert mistakes(path) == ["graph.yaml:5:3: key 'decode' is written twice, first in line 3; keep one"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: [demo\n", "graph.yaml:2:1: did not find expected ',' or ']'"),
        ("", "graph.yaml: is empty; must be a mapping, with at least a `model`"),
        ("block_size: 16\n", "graph.yaml: model: missing; it has no default"),
        ("model: \x07\n", "graph.yaml: not valid YAML: unacceptable character #x0007"),
        ("? [a]\n: b\n", "graph.yaml:1:3: a key must be a word, not a sequence"),
        ("? {a: 1}\n: b\n", "graph.yaml:1:3: a key must be a word, not a mapping"),
        ("a: " + "[" * 2000, "graph.yaml:1:1003: exceeded maximum nesting depth"),
        ("model: &a [*a]\n", "graph.yaml: model: must be a valid string, got [[...]]"),
        ("model: 2026-02-30\n", "graph.yaml: not valid YAML: day is out of range"),
        ("model: demo\n1: 2\n", "graph.yaml: 1: "),
    ],
)
def test_a_file_that_is_no_graph_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    found = mistakes(write(tmp_path, text))
    assert len(found) == 1
    assert found[0].startswith(line)


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("planner:\n", "planner"),
        ("slo: # later\n", "slo"),
        ("roles:\n  prefill: {}\n  decode:\n", "roles.decode"),
        ("planner: {max_workers: 8, budget: }\n", "planner.budget"),
    ],
)
def test_a_section_without_content_is_not_taken_for_one_left_out(
    tmp_path: Path, text: str, section: str
) -> None:
    (found,) = mistakes(write(tmp_path, f"model: demo\n{text}"))
    assert found.startswith(f"graph.yaml: {section}: is empty; must be a mapping: give its fields, ")
    assert f"`{section.rpartition('.')[2]}: {{}}` for their defaults, or leave it out" in found


def test_an_empty_mapping_is_the_defaults(tmp_path: Path) -> None:
    graph = load(write(tmp_path, "model: demo\nplanner: {}\n"))
    assert graph.planner is not None
    assert graph.planner.max_workers == 8
    assert load(write(tmp_path, "model: demo\nplanner: null\n")).planner is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.yaml", None, "no such file or directory"),
        ("absent.py", None, "no such file or directory"),
        ("latin.yaml", b"model: caf\xe9\n", "not UTF-8 text (byte 10); a graph is YAML"),
        ("a.py", b"graph = 3\n", "must set `graph` to a penstock.graph.Graph, got int"),
        ("a.py", b"grahp = 3\n", "does not set `graph`; it must set it to a penstock.graph.Graph"),
        ("a.py", b"1 / 0\n", "ZeroDivisionError: division by zero"),
        ("a.py", b"import sys\nsys.exit(7)\n", "ended with sys.exit(7); it must set `graph`"),
        ("a.py", b"raise ValueError('two\\nlines')\n", "ValueError: two lines"),
        (
            "a.py",
            b"from penstock.graph import Graph\ngraph = Graph(model='demo', block_size=0)\n",
            "block_size: must be >= 1, got 0",
        ),
    ],
)
def test_a_file_that_gives_no_graph_is_one_line(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert mistakes(tmp_path / name) == [f"{name}: {said}"]


def test_prefill_workers_may_be_none_and_tensor_parallelism_may_differ(tmp_path: Path) -> None:
    for roles in (
        "{prefill: {replicas: 0}, decode: {}}",
        "{prefill: {engine: mock, tensor_parallel: 2}, decode: {engine: mock, tensor_parallel: 4}}",
    ):
        load(write(tmp_path, f"model: demo\nroles: {roles}\n"))


def test_a_slip_in_a_region_of_the_topology_is_refused(tmp_path: Path) -> None:
    graph = (
        "model: demo\nroles: {aggregated: {replicas: 2, locations: %s}}\n"
        "router: {location: {region: '%s'}, topology: {pairs: [%s]}}\n"
    )

    def written(places: str, router: str, *pairs: str) -> Path:
        way = "latency_s: 0.01, bandwidth_bytes_per_s: 1.0e+9"
        ends = (pair.split("/") for pair in pairs)
        table = ", ".join(f"{{one: {one}, other: {other}, {way}}}" for one, other in ends)
        return write(tmp_path, graph % (places, router, table))

    both = "[{region: europe}, {region: us-1}]"
    for router, pairs in (
        ("", ["europe/us-1", "europe/us-2"]),  # all of its own are described; a table may have more
        ("", ["europe/asia"]),
        ("asia", ["europe/us-1", "asia/us-1"]),
    ):
        load(written(both, router, *pairs))
    for places in ("[]", "[{region: us-1}, {}]"):  # the rest may come from the environment of processes
        load(written(places, "europe", "us-1/euorpe"))
    for router, pairs, index, region, known, meant in (
        ("", ["us-1/euorpe"], 0, "euorpe", "europe, us-1", "europe"),
        ("asia", ["europe/us-1", "aisa/us-1"], 1, "aisa", "asia, europe, us-1", "asia"),
    ):
        (mistake,) = mistakes(written(both, router, *pairs))
        assert mistake == (
            f"graph.yaml: router.topology.pairs.{index}: nobody is in region '{region}'; roles.*.locations and"
            f" router.location name {known}; did you mean '{meant}'?"
        )


def test_set_reaches_into_lists(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: demo\nroles: {aggregated: {locations: [{host: a}]}}\n",
    )
    places = "roles.aggregated.locations"

    def locations(*changes: str) -> tuple[Location, ...]:
        role = load(path, Overrides(list(changes))).roles.aggregated
        assert role is not None
        return role.locations

    assert locations(f"{places}.0.rack=r7") == (Location(host="a", rack="r7"),)
    assert mistakes(path, f"{places}.1.rack=7") == [
        f"--set {places}.1.rack: 1 is no index of a list of 1; set the whole list, as [...]"
    ]
    assert locations(f"{places}=[]") == ()


def test_mistakes_of_set_name_the_flag(tmp_path: Path) -> None:
    path = write(tmp_path, "model: demo\nblock_size: 0\n")
    assert mistakes(path, "roles.aggregated.replcas=4") == [
        "graph.yaml: block_size: must be >= 1, got 0",
        "--set: roles.aggregated.replcas: unknown key; did you mean 'replicas'?",
    ]
    assert mistakes(path, "roles") == [
        "--set roles: must be key=value, as in --set roles.aggregated.replicas=2"
    ]
    assert mistakes(path, "block_size.x=2") == ["--set block_size.x: 'x' can only be set in a mapping, got 0"]
    assert mistakes(path, "slo=[") == ["--set slo: did not find expected node content"]


@pytest.mark.parametrize(
    ("assignments", "is_twice"),
    [
        (["block_size=8", "block_size=16"], True),
        (["frontend={port: 1}", "frontend.port=2"], True),
        (["frontend.port=2", "frontend={}"], True),  # which would undo it
        (["frontend={host: 0.0.0.0}", "frontend.port=2"], False),
        (["frontend.port=2", "frontend.host=0.0.0.0"], False),
    ],
)
def test_a_field_is_set_once(assignments: list[str], is_twice: bool) -> None:
    if not is_twice:
        assert build({"model": "demo"}, Overrides(assignments)).frontend.port == 2
        return
    first, second = (assignment.partition("=")[0] for assignment in assignments)
    with pytest.raises(ConfigError) as caught:
        Overrides(assignments)
    assert caught.value.message == (f"--set {second} and --set {first} set the same field; give one of them")


def test_a_mapping_that_only_a_flag_brought_about_is_the_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "model: demo\nb: {c: 1}\n")
    first, second = mistakes(path, "a.b=1", "b.d=2")
    assert first.startswith("graph.yaml: b: unknown key")
    assert second.startswith("--set a.b: a: unknown key")


def test_flags_are_sugar_for_set_and_named_in_mistakes() -> None:
    flags = Overrides()
    flags.assign("model", "demo", flag="MODEL")
    flags.assign("roles.aggregated.replicas", "2", flag="--workers")
    assert build({}, flags) == Graph(model="demo", roles=Roles(aggregated=RoleSpec(replicas=2)))
    flags = Overrides(["model=demo"])
    flags.assign("roles.aggregated.replicas", "two", flag="--workers")
    with pytest.raises(ConfigError) as caught:
        build({}, flags)
    assert caught.value.message == "--workers: roles.aggregated.replicas: must be a valid integer, got 'two'"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    assert load(path).model


def test_a_graph_survives_its_own_json() -> None:
    graph = Graph(model="demo", roles=Roles(aggregated=RoleSpec(engine="mock", replicas=3)))
    assert Graph.model_validate_json(graph.model_dump_json()) == graph


PROFILE = Profile(
    engine="paged",
    prefill=(PrefillPoint(new_tokens=256, seconds=0.2), PrefillPoint(new_tokens=1024, seconds=0.9)),
    decode=(DecodePoint(batch=1, context=256, seconds=0.02), DecodePoint(batch=8, context=256, seconds=0.05)),
)
PYTHON_WITH_PROFILE = """
from penstock.graph import Graph, Roles, RoleSpec
graph = Graph(model='demo', roles=Roles(aggregated=RoleSpec(profile='p.json')))
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("graph.yaml", "model: demo\nroles:\n  aggregated: {profile: p.json}\n"),
        ("graph.py", PYTHON_WITH_PROFILE),
    ],
)
def test_a_profile_lies_relative_to_the_graph_and_is_named_from_the_root(tmp_path, name, text) -> None:
    PROFILE.save(tmp_path / "p.json")
    path = write(tmp_path, text, name)
    for overrides in (None, Overrides(["block_size=32"])):
        role = load(path, overrides).roles.aggregated
        assert role is not None
        assert role.profile == str(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("graph.yaml", "model: demo\nchat_template: t.jinja\n"),
        ("graph.yaml", "model: demo\nchat_template: |-\n  {{ messages }}\n"),
        (
            "graph.py",
            "from penstock.graph import Graph\ngraph = Graph(model='demo', chat_template='t.jinja')",
        ),
    ],
)
def test_a_chat_template_is_a_file_beside_the_graph_or_a_text(tmp_path, name, text) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    path = write(tmp_path, text, name)
    graph = load(path)
    assert graph.chat_template == "{{ messages }}"
    assert Graph.model_validate_json(graph.model_dump_json()) == graph
    (tmp_path / "t.jinja").write_text("")
    if "{" not in text:
        with pytest.raises(ConfigError, match=r"chat_template: .*t\.jinja: has no Jinja"):
            load(path)
        (tmp_path / "t.jinja").unlink()
        with pytest.raises(ConfigError, match=r"chat_template: .*t\.jinja: no such file"):
            load(path, Overrides(["block_size=32"]))


def test_a_profile_that_cannot_be_read_is_named_where_it_was_said(tmp_path: Path) -> None:
    path = write(tmp_path, "model: demo\nroles:\n  aggregated: {profile: p.json}\n")
    absent = "p.json: no such file; `penstock profile` writes one"
    assert mistakes(path) == [f"graph.yaml: roles.aggregated.profile: {absent}"]
    plain = write(tmp_path, "model: demo\n", "plain.yaml")
    setting = "roles.aggregated.profile=p.json"
    assert mistakes(plain, setting) == [f"--set: roles.aggregated.profile: {absent}"]
    write(tmp_path, "{}", "p.json")
    assert "not a profile" in mistakes(path)[0]


@pytest.mark.parametrize("engine", ["paged", "mock"])
def test_workers_of_a_role_with_a_profile_say_what_was_measured(tmp_path: Path, engine: str) -> None:
    plain = RoleSpec()
    promised = make_roofline(load_shape(MODEL_DIR), plain)
    three_times_as_slow = Profile(
        engine="paged",
        prefill=(PrefillPoint(new_tokens=64, seconds=3 * promised.prefill_s(64)),),
        decode=(DecodePoint(batch=1, context=256, seconds=3 * promised.decode_step_s(1, 256)),),
    )
    three_times_as_slow.save(tmp_path / "p.json")
    measured = engine_prices(RoleSpec(engine=engine, profile=str(tmp_path / "p.json")), MODEL_DIR)
    for name in ("prefill_step_s", "prefill_token_s", "prefill_pair_s", "decode_step_s", "decode_token_s"):
        expected = 3 * getattr(engine_prices(plain, MODEL_DIR), name)
        assert getattr(measured, name) == pytest.approx(expected, rel=1e-3, abs=1e-15), name


def test_roles_take_short_names_and_every_parallelism(tmp_path: Path) -> None:
    role = (
        "engine: mock, weight_dtype: bf16, expert_dtype: nvfp4, kv_dtype: fp32, tensor_parallel: 2,"
        " pipeline_parallel: 3, data_parallel: 4, expert_parallel: 8, hardware: H100"
    )
    spec = load(write(tmp_path, f"model: demo\nroles: {{aggregated: {{{role}}}}}\n")).roles.aggregated
    assert spec is not None
    assert (spec.devices, spec.hardware) == (2 * 3 * 4, "h100")
    assert (spec.weight_dtype, spec.kv_dtype, spec.expert_dtype) == ("bfloat16", "float32", "nvfp4")


def test_adapters_are_spread_over_the_replicas() -> None:
    def adapters(replicas: int, **fields: int) -> list[tuple[str, ...]]:
        role = RoleSpec(engine="mock", adapters=("a", "b", "c"), replicas=replicas, **fields)
        return [role.adapters_of(index) for index in range(replicas)]

    assert adapters(2) == [("a", "b", "c")] * 2
    assert adapters(3, adapters_per_worker=2) == [("a", "b"), ("c", "a"), ("b", "c")]
