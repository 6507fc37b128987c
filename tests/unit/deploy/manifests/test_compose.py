"""Compose files: valid, and what each container of the host starts."""

from pathlib import Path

import compose_spec
import pytest
import yaml

from penstock import cli
from penstock.cli import make_parser
from penstock.deploy.manifests.compose import compose_file
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.supervisor.local_part import LocalPart
from penstock.graph import Graph, Overrides, build, load
from tests.support.rendered import EXAMPLES, example

OF_SEVERAL_HOSTS = "671b-", "deepseek-r1-", "70b-gb200"


@pytest.fixture(
    params=[path for path in EXAMPLES if not path.name.startswith(OF_SEVERAL_HOSTS)],
    ids=lambda path: path.stem,
)
def graph(request: pytest.FixtureRequest) -> Graph:
    return example(request.param)


def test_a_file_is_valid_and_starts_the_graph(graph: Graph, tmp_path: Path) -> None:
    text = compose_file(graph, RenderOptions())
    compose_spec.PyCompose.from_yaml(text)
    document = yaml.safe_load(text)
    (tmp_path / "graph.yaml").write_text(document["configs"]["graph-yaml"]["content"].replace("$$", "$"))
    run: dict[str, int] = {}
    gpus: list[str] = []
    for name, service in document["services"].items():
        if name.endswith("-owner"):
            continue
        command, _, *flags = service["command"]
        options = make_parser().parse_args([command, str(tmp_path / "graph.yaml"), *flags])
        overrides = Overrides(options.set)
        if options.join is not None:
            overrides.assign("runtime.join", options.join, flag="--join")
        read = load(options.file, overrides)
        part = LocalPart.parse(options.part, read.roles.present())
        if part.has_frontends:
            run["frontend"] = read.frontend.processes
            assert read.runtime.hub == "tcp://frontend:7400", "the name of its service"
        else:
            assert (read.runtime.join, options.join) == ("tcp://frontend:7400",) * 2
        count = service.get("deploy", {}).get("replicas", 1)
        for role, spec in part.of(read.roles.present()).items():
            run[role] = run.get(role, 0) + count * spec.replicas
        reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        gpus += [index for each in reserved for index in each["device_ids"]]
        assert service["read_only"], name
        assert service["environment"]["PENSTOCK_SECRET"].startswith("${PENSTOCK_SECRET:?"), "no value"
        named = {each["source"] for each in service["volumes"] if each["type"] == "volume"}
        assert named <= set(document.get("volumes", {}))
    assert run == {
        "frontend": graph.frontend.processes,
        **{role: spec.replicas for role, spec in graph.roles.present().items()},
    }
    assert len(gpus) == len(set(gpus)), "no GPU is given twice"


def test_a_misspelt_field_would_be_found() -> None:
    text = compose_file(example(EXAMPLES[0]), RenderOptions())
    with pytest.raises(ValueError, match="stop_grace_perid"):
        compose_spec.PyCompose.from_yaml(text.replace("stop_grace_period", "stop_grace_perid"))


def test_workers_with_a_disk_tier_or_vllms_connector_are_services_of_their_own() -> None:
    role = {"engine": "paged", "replicas": 2, "kv": {"disk": "/var/lib/kv/blocks:1GiB"}}
    document = yaml.safe_load(
        compose_file(build({"model": "demo", "roles": {"aggregated": role}}), RenderOptions())
    )
    workers = ["aggregated-1-owner", "aggregated-1", "aggregated-2-owner", "aggregated-2"]
    assert list(document["services"]) == ["frontend", *workers]
    assert document["services"]["aggregated-2"]["volumes"] == [
        {"type": "volume", "source": "aggregated-2-kv", "target": "/var/lib/kv"}
    ]
    owner = document["services"]["aggregated-2-owner"]
    assert owner["entrypoint"] == ["/bin/chown", document["services"]["aggregated-2"]["user"], "/var/lib/kv"]
    assert owner["volumes"] == document["services"]["aggregated-2"]["volumes"]
    waits = document["services"]["aggregated-2"]["depends_on"]
    assert waits["aggregated-2-owner"] == {"condition": "service_completed_successfully"}
    role = {"engine": "vllm", "hardware": "h100", "tensor_parallel": 2, "replicas": 2}
    document = yaml.safe_load(
        compose_file(build({"model": "org/m", "roles": {"aggregated": role}}), RenderOptions())
    )
    second = document["services"]["aggregated-2"]
    assert second["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "aggregated-2"
    (reserved,) = second["deploy"]["resources"]["reservations"]["devices"]
    assert reserved["device_ids"] == ["2", "3"]


@pytest.mark.parametrize(
    ("host", "published"),
    [
        (None, "127.0.0.1:8000:8000"),
        ("localhost", "127.0.0.1:8000:8000"),
        ("::1", "[::1]:8000:8000"),
        ("0.0.0.0", "8000:8000"),
        ("::", "8000:8000"),
    ],
)
def test_the_port_is_published_where_the_graph_listens(host: str | None, published: str) -> None:
    frontend = {} if host is None else {"host": host}
    text = compose_file(build({"model": "demo", "frontend": frontend}), RenderOptions())
    compose_spec.PyCompose.from_yaml(text)
    assert yaml.safe_load(text)["services"]["frontend"]["ports"] == [published]


def test_text_of_the_graph_is_no_variable() -> None:
    text = compose_file(build({"model": "demo", "served_name": "${HOME} $(x) {{ y }}"}), RenderOptions())
    content = yaml.safe_load(text)["configs"]["graph-yaml"]["content"]
    assert "$${HOME} $$(x) {{ y }}" in content


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("model: demo\n")
    assert cli.main(["render", str(path), "--target", "compose"]) == 0
    compose_spec.PyCompose.from_yaml(capsys.readouterr().out)
