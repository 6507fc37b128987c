"""From a clone to an answer on two hosts: the commands of docs/many-machines.md as they stand, in two network namespaces."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cable import Cable, cable, ip
from tests.support.host import Host

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces")]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "many-machines.md").read_text()
SECTION = PAGE.partition("\n## Two hosts in three commands\n")[2].partition("\n## ")[0]
ADDRESSES = ("10.0.0.1", "10.0.0.2")
INSTALL_TIMEOUT_S = 300


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", SECTION)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Clone this checkout, and run what the page says about it; packages come from uv's cache, as for any second checkout."""
    folder = tmp_path / "penstock"
    (setup,) = blocks("sh")
    assert re.match(r"git clone \S+ penstock\n", setup)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    prepare = next(line for line in setup.splitlines() if "make venv" in line)
    settings = {"MAKEFLAGS": "PENSTOCK_NATIVE=OFF", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-ec", prepare],
        check=False,
        cwd=folder.parent,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Cable, Host, Host]]:
    with cable() as laid, ExitStack() as stack:
        for name, card, address in zip(laid.names, laid.cards, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", card)
        pair = [
            Host(name, tmp_path / f"host-{letter}", stack)
            for name, letter in zip(laid.names, "ab", strict=True)
        ]
        yield laid, *pair


def test_three_commands(clone: Path, hosts: tuple[Cable, Host, Host]) -> None:
    _, first, second = hosts
    up, join, ask = blocks("bash")
    activate = ". .venv/bin/activate\nexec "
    for host, command, ready in ((first, up, "ready"), (second, join, "ready +no frontend here")):
        host.start("bash", "-ec", activate + command, cwd=clone)
        host.wait(rf"^penstock +{ready}")
    asked = subprocess.run(
        second.command("bash", "-ec", ask.replace("curl ", "curl -sS ")),
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(asked.stdout)["choices"][0]["message"]["content"]
    workers = first.get(f"http://{ADDRESSES[0]}:8000/admin/workers")["workers"]
    assert {worker["name"]: worker["condition"] for worker in workers} == {
        "worker-1@host-a": "ready",
        "worker-1@host-b": "ready",
    }
