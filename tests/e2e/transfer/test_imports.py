"""`import penstock.transfer` is a library of its own: nothing of the serving stack comes with it."""

import json
import subprocess
import sys

_LISTED = (
    "import json, sys, penstock.transfer, penstock.transfer.metrics; print(json.dumps(sorted(sys.modules)))"
)
_ITS_OWN = {"core", "seams", "transfer", "_native"}
_STACK = {"torch", "transformers", "aiohttp", "uvloop", "openai", "obstore", "nixl", "tokenizers"}


def test_the_import_brings_nothing_of_the_serving_stack() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", _LISTED], check=True, capture_output=True, text=True
    ).stdout
    names = json.loads(listed)
    floors = {name.split(".")[1] for name in names if name.startswith("penstock.")}
    assert "transfer" in floors
    assert floors <= _ITS_OWN
    assert not _STACK & {name.split(".")[0] for name in names}
