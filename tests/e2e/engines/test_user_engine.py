"""The engine of docs/engines.md, served as the page says."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


def test_the_engine_of_the_page_is_served(tmp_path, runtime_dir):
    section = PAGE.read_text().partition("\n## An engine of your own\n")[2]
    (tmp_path / "echo_engine.py").write_text(re.findall(r"(?ms)^```python\n(.*?)^```$", section)[0])
    command = [sys.executable, "-m", "penstock", "serve", "--demo", "--engine", "echo_engine:EchoEngine"]
    with subprocess.Popen(
        [*command, "--port", "0", "--workers", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            url = next(m[1] for line in process.stdout if (m := re.search(r"ready +(http://\S+)", line)))
            body = {"model": "penstock-demo", "prompt": "one two three four", "max_tokens": 40}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                answer = json.load(response)
        finally:
            process.terminate()
            process.stdout.close()
    assert "one two three fourone two three four" in answer["choices"][0]["text"].replace("</s>", "")
    assert answer["usage"]["completion_tokens"] == 40
