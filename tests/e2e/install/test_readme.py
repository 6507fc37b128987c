"""The code of the README, of the operations page and of the routing reference, run as it stands against a deployment."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
ROUTING = (ROOT / "docs" / "routing-reference.md").read_text()


def block(language: str, containing: str, page: str = README) -> str:
    (found,) = [b for b in re.findall(rf"(?ms)^```{language}\n(.*?)^```$", page) if containing in b]
    return found


def run_as_shown(command: str, directory: Path) -> str:
    """Run one line of the README in a directory with the examples."""
    if not (directory / "examples").exists():
        (directory / "examples").symlink_to(ROOT / "examples")
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    return out.decode()


def test_the_openai_client_as_shown(deploy):
    async def scenario(site):
        code = block("python", "from openai").replace("http://127.0.0.1:8000", site.url)
        assert (await output_of(sys.executable, "-c", code)).strip()

    deploy(scenario)


@pytest.mark.needs("curl")
def test_curl_as_shown(deploy):
    async def scenario(site):
        shell = block("bash", "chat/completions").replace("http://127.0.0.1:8000", site.url)
        answer = json.loads(await output_of("sh", "-ec", shell.replace("curl ", "curl -sS ")))
        assert answer["choices"][0]["message"]["content"]
        shell = block("bash", "/admin/workers", OPERATIONS).replace("http://127.0.0.1:8000", site.url)
        looks = await output_of("sh", "-ec", shell.replace("curl ", "curl -sS "))
        assert '"name":"worker-1"' in looks
        assert "penstock_router_workers" in looks

    deploy(scenario)


@pytest.mark.parametrize("command", re.findall(r"(?m)^penstock simulate .*$", README))
def test_simulate_as_shown(command: str, tmp_path: Path):
    assert "TTFT" in run_as_shown(command, tmp_path)
    for name in re.findall(r"--html (\S+)", command):
        assert (tmp_path / name).stat().st_size > 10_000


def test_the_prefix_index_as_shown():
    code = block("python", "RadixTree", ROUTING)
    assert "assert" in code
    subprocess.run([sys.executable, "-c", code], check=True)
