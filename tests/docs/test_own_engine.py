"""The engine of your own in examples: at most 62 lines of code, and it passes the suite as docs/engines.md says."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from echo_engine_suite import TestEchoEngine  # noqa: E402, F401 - pytest collects it


def test_the_engine_is_short() -> None:
    module = ast.parse((ROOT / "examples" / "echo_engine.py").read_text())
    module.body = module.body[1:]  # the docstring
    assert len([line for line in ast.unparse(module).splitlines() if line]) <= 62


def test_the_page_says_how_to_serve_it() -> None:
    assert "--engine echo_engine:EchoEngine" in (ROOT / "docs" / "engines.md").read_text()
