"""`penstock kv` says by its exit status whether every worker has acted."""

import json

import pytest

from penstock.cli import main
from penstock.deploy.commands import kv

REFUSAL = "worker-2: engine vllm has no KV cache that operators can manage; paged and mock have"
DONE = {"worker": "worker-1", "blocks": 7}


@pytest.mark.parametrize(
    ("workers", "code", "text"),
    [
        ([DONE], 0, "worker-1: 7 blocks flushed\n"),
        ([DONE, {"worker": "worker-2", "problem": REFUSAL}], 1, f"worker-1: 7 blocks flushed\n{REFUSAL}\n"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_status_is_1_where_a_worker_refuses(monkeypatch, capsys, tmp_path, workers, code, text, as_json):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    answer = json.dumps({"workers": workers})
    monkeypatch.setattr(kv, "ask", lambda *_args, **_named: answer)
    assert main(["kv", "flush", *["--json"] * as_json]) == code
    assert capsys.readouterr().out == (f"{answer}\n" if as_json else text)
