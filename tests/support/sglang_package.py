"""The fake of SGLang as a package that processes of a deployment import."""

import json
import os
from pathlib import Path

from penstock.demo import MODEL_DIR

VOCAB_SIZE = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
_ROOT = Path(__file__).parents[2]
_SOURCE = f"""
from tests.fakes import sglang
from tests.fakes.sglang import *
sglang.MODEL.vocab_size, sglang.MODEL.context_length = {VOCAB_SIZE}, 4096
from penstock.engine.mock.engine import MockConfig
from penstock.testing.engines import reference
reference.MockConfig = lambda speedup: MockConfig(speedup=0.5)  # so that a stream can be cut
__version__ = "0.5.23"
"""


def sglang_path(folder: Path) -> str:
    """Make the package in `folder`; gives the `PYTHONPATH` of processes that import it."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").write_text(_SOURCE)
    path = [str(folder), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, path))
