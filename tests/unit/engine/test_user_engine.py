"""Users' engines by `package.module:make`: made with the graph's spec, refused with one line."""

import re
import sys

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.registry import create_engine, engine_kind
from penstock.engine.spec import EngineSpec
from penstock.graph import build
from penstock.graph.overrides import Overrides

SPEC = EngineSpec(model="/nowhere", block_size=16, args={"depth": 3}, adapters=("french",))
MODULE = """
from penstock.core.errors import ConfigError
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo


def make(spec):
    if spec.args.get("depth") != 3:
        raise ConfigError(f"engine_args.depth: must be 3, got {spec.args.get('depth')}")
    engine = mock_engine(RunnerInfo(8, spec.block_size, 100, 100), MockConfig())
    engine.given = spec
    return engine


def nothing(spec):
    return None


def leaves(spec):
    raise SystemExit(3)


def broken(spec):
    return spec.weights


class Half:
    def __init__(self, spec):
        pass

    def start(self): ...

    def submit(self, request): ...


NUMBER = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "their_engine.py").write_text(MODULE)
    (tmp_path / "their_broken_engine.py").write_text("raise OSError('no such device')\n")
    (tmp_path / "their_program.py").write_text("import sys; sys.exit('usage: their_program MODEL')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("their_engine", "their_broken_engine", "their_program"):
        sys.modules.pop(name, None)


def graph(engine):
    roles = {"aggregated": {"engine": engine, "adapters": ["french"], "weight_dtype": "fp8"}}
    return build({"model": "/nowhere", "roles": roles}, Overrides(), source="graph.yaml")


def test_a_users_engine_is_made_with_the_spec():
    assert create_engine("their_engine:make", SPEC).given is SPEC


def test_a_graph_names_a_users_engine_and_leaves_its_settings_to_it():
    role = graph({"name": "their_engine:make", "args": {"depth": 2}}).roles.aggregated
    assert (role.engine, role.engine_args) == ("their_engine:make", {"depth": 2})
    assert engine_kind(role.engine).takes_args


def test_checking_a_graph_runs_no_code_of_a_users():
    assert graph("their_broken_engine:make").roles.aggregated.engine == "their_broken_engine:make"
    assert "their_broken_engine" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:make", "engine 'nowhere.at_all:make': there is no module 'nowhere'"),
        ("a b:make", "engine 'a b:make': expected `package.module:make`"),
        ("their_engine:", "expected `package.module:make`, importable by every worker (PYTHONPATH)"),
        ("their_engine", "there is no engine 'their_engine'"),
    ],
)
def test_what_is_wrong_with_a_name_is_said_before_anything_starts(name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        graph(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("their_engine.at_all:make", "'their_engine.at_all' cannot be imported: ModuleNotFoundError"),
        ("their_broken_engine:make", "cannot be imported: OSError: no such device"),
        ("their_program:make", "cannot be imported: SystemExit: usage: their_program MODEL"),
        ("their_engine:leaves", "leaves(spec) raised SystemExit: 3"),
        ("their_engine:mke", "their_engine has no 'mke'; did you mean 'make'?"),
        ("their_engine:NUMBER", "their_engine has no 'NUMBER'"),
        ("their_engine:broken", "broken(spec) raised AttributeError: 'EngineSpec' object has no attribute"),
        ("their_engine:nothing", "nothing(spec) returned a NoneType without start, submit, abort, steps"),
        ("their_engine:Half", "returned a Half without abort, steps, load, close; expected a penstock.seams"),
    ],
)
def test_what_is_wrong_with_an_engines_code_is_said_when_a_worker_starts(name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        create_engine(name, SPEC)


def test_an_engines_own_refusal_stays_as_it_is():
    with pytest.raises(ConfigError, match=re.escape("engine_args.depth: must be 3, got None")) as refused:
        create_engine("their_engine:make", EngineSpec(model="", block_size=16))
    assert refused.value.message.startswith("engine_args.depth")
